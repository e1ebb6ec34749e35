"""``distcollect collect``: collects frames of an env and writes them to disk."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from distcollect.collectors.classes import RPCDataCollector
from distcollect.commands.argtypes import count, declare, import_from_here
from distcollect.commands.collect.saved import SavedFrames
from distcollect.commands.main import INTERRUPTED
from distcollect.commands.named import (
    NamedPolicy,
    add_policy_arguments,
    named_env,
    named_policy,
    tried_env,
)
from distcollect.config import Monitor
from distcollect.errors import ArgumentError
from distcollect.integrations.minari import MinariTarget
from distcollect.launch.run import run as launch
from distcollect.results import Stats
from distcollect.telemetry.display import is_terminal, log_line
from distcollect.telemetry.monitor import wants_view

_STEPS = 256  # of each env in a rollout, by default
_PRINT_EVERY_S = 30.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add = partial(declare, parser.add_argument)
    about = 'a Gymnasium id, "module:ID", or MODULE:NAME of a class or function that makes an env'
    add("--env ID", about, required=True)
    add("--frames N", "number of frames", type=count, required=True)
    about = "a new folder; or one of an earlier call, to continue up to N frames"
    add("--out DIR", about, type=Path, required=True)
    add_policy_arguments(parser)
    add("--deterministic", "take the policy's most likely actions", action="store_true")
    add("--num-workers W", "worker processes (default: one per core)", type=count)
    add("--envs-per-worker n", "number of envs in each worker", type=count, default=1)
    about = f"frames that a worker delivers at a time (default: {_STEPS} from each of its envs)"
    add("--frames-per-batch F", about, type=count)
    add("--seed S", "a seed: the same seed gives the same frames", type=int)
    about = "also write the whole episodes to a Minari data set, such as cartpole/random-v0"
    add("--minari NAME", about)
    add("--author TEXT", "who made the Minari data set")
    add("--author-email TEXT", "how to reach its author")
    add("--code-permalink TEXT", "where the code is that made it")


def run(given: argparse.Namespace) -> int:
    """Collect; 0 when all frames are written, 130 after Ctrl-C.

    Raises:
        ArgumentError, ArgumentTypeError: an argument is wrong; nothing was started.
        CollectorStateError: another process is writing to the folder.
        DistCollectError: collecting failed.
    """
    status = launch(lambda: _collect(given))
    return 0 if status is None else status


def _collect(given: argparse.Namespace) -> int:
    import_from_here()
    policy = named_policy(given.policy, given.weights, trust=given.trust_policy)
    minari = _minari_target(given)
    make_env = named_env(given.env)
    with contextlib.closing(tried_env(given.env, make_env)) as env:
        if minari is not None:
            minari.check(env)
    names = ("env", "deterministic", "num_workers", "envs_per_worker", "frames_per_batch", "seed")
    settings = {name: getattr(given, name) for name in names}
    settings["policy"] = policy.identity
    with SavedFrames(given.out, given.frames, settings) as saved:
        if saved.is_complete:
            _print(f"{saved.frames:,} frames are in {given.out} already")
        else:
            try:
                _fill(saved, given, make_env, policy)
            except KeyboardInterrupt:
                _print(
                    f"interrupted with {saved.frames:,} of {given.frames:,} frames in {given.out}: "
                    "the same command continues from there"
                )
                return INTERRUPTED
            _print(
                f"{saved.frames:,} frames are in {given.out}: TensorDict.load_memmap() reads them"
            )
        if minari is not None:
            _write_minari(minari, saved, given.env, make_env, settings)
    return 0


def _minari_target(given: argparse.Namespace) -> MinariTarget | None:
    about = {name: getattr(given, name) for name in ("author", "author_email", "code_permalink")}
    if given.minari is not None:
        return MinariTarget(given.minari, given.policy or "random", **about)
    for name, value in about.items():
        if value is not None:
            raise ArgumentError(
                f"--{name.replace('_', '-')} {value}: it goes into a Minari data set; name one by "
                "--minari NAME"
            )
    return None


def _write_minari(
    minari: MinariTarget, saved: SavedFrames, name: str, make_env: Any, settings: Mapping[str, Any]
) -> None:
    with contextlib.closing(tried_env(name, make_env)) as env:
        num_episodes, num_frames = minari.write(
            saved.folder, saved.frames, env, settings, rests=sorted(saved.rests)
        )
    rest = saved.frames - num_frames
    _print(
        f"{num_episodes:,} whole episodes ({num_frames:,} frames) are in the Minari data set "
        f"{minari.dataset_id}, in {minari.folder}; {rest:,} frames of unfinished ones are not"
    )


def _fill(
    saved: SavedFrames, given: argparse.Namespace, make_env: Any, policy: NamedPolicy
) -> None:
    num_envs = given.envs_per_worker
    missing = saved.num_frames - saved.frames
    default = num_envs * min(_STEPS, -(-missing // num_envs))
    frames_per_batch = given.frames_per_batch or default
    with RPCDataCollector(
        make_env,
        policy_factory=policy.factory,
        frames_per_batch=frames_per_batch,
        # A multiple of frames_per_batch; SavedFrames ignores surplus frames.
        total_frames=-(-saved.num_frames // frames_per_batch) * frames_per_batch,
        num_workers=given.num_workers,
        envs_per_worker=num_envs,
        exploration_type="deterministic" if given.deterministic else "random",
        # Otherwise batches arrive in any order, and the frames differ each time.
        reproducible=given.seed is not None,
        monitor=_monitor(),
    ) as collector:
        if saved.frames:
            earlier = {
                "frames": saved.frames,
                "next_traj_id": saved.next_traj_id,
                "seed": None if given.seed is None else (given.seed, False),
                "resumes": saved.resumes - 1,
            }
            collector.load_state_dict({**collector.state_dict(), **earlier})
        elif given.seed is not None:
            collector.set_seed(given.seed)
        while not saved.is_complete:
            saved.add(collector.next(), collector.rests)


def _monitor() -> Monitor | None:
    """Without a display on a terminal, print a line from time to time."""
    if is_terminal(sys.stderr) or not wants_view(Monitor()):
        return None

    def show(stats: Stats) -> None:
        if not stats.ended:
            _print(log_line(stats))

    return Monitor(view=False, callback=show, every_s=_PRINT_EVERY_S)


def _print(message: str) -> None:
    print(f"distcollect collect: {message}", file=sys.stderr, flush=True)
