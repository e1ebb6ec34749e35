"""``distcollect bench``: the user's env and policy in collectors, beside a bare loop over the same.

The bare loop calls the policy for n envs at once, as collectors do, steps them, and writes frames
into memory that was allocated before: what remains when nothing is delivered. With W workers, W
bare loops run side by side, in a process each. Loop and collector take turns, a window each, as
the load and the clock rate of a machine change within seconds by more than the difference that is
to be measured; the figures are ratios of two windows that follow each other.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, TypeAlias

import cloudpickle
import gymnasium as gym
import numpy as np
import torch

import distcollect as dc
from distcollect.commands.argtypes import (
    above_0,
    count,
    declare,
    import_from_here,
    natural,
    writable,
)
from distcollect.commands.named import (
    add_policy_arguments,
    named_env,
    named_policy,
    tried_env,
)
from distcollect.common.tables import text_table
from distcollect.envs.make import first_env_maker
from distcollect.errors import ArgumentError, LaunchError
from distcollect.policy.base import Policy
from distcollect.policy.random import RandomPolicy
from distcollect.policy.user import UserPolicy
from distcollect.rollout.spaces import flatten, leaves_of, unflatten
from distcollect.telemetry.bottleneck import find_bottleneck

Maker: TypeAlias = Callable[[], Any]
Window: TypeAlias = Callable[[float], float]  # collects for so many seconds; gives frames/s

_ROLLOUT_S = 0.05  # about how long a rollout takes: shorter ones cost more than they need to
_MOST_STEPS = 512
_TRIAL_STEPS = 8
_WARM_UP_ROLLOUTS = 3
_TELLING_S = 2.0  # the bottleneck of a shorter time tells little
_ANSWER_S = 120.0  # for a process of a bare loop to answer, beyond its window


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add = partial(declare, parser.add_argument)
    about = 'a Gymnasium id, "module:ID", or MODULE:NAME of a class or function that makes an env'
    add("--env ID", about, required=True)
    add_policy_arguments(parser)
    about = "numbers of envs in each process"
    add("--envs N,...", about, type=partial(_listed, count), default="1,16,64")
    about = "numbers of worker processes; 0: envs in this process"
    add("--workers N,...", about, type=partial(_listed, natural), default="0,2")
    add("--seconds S", "length of each window", type=above_0, default=1.0)
    add("--pairs N", "pairs of windows for each size", type=count, default=5)
    add("--json FILE", "write the figures to this file", type=writable)


def _listed(kind: Callable[[str], int], text: str) -> list[int]:
    return [kind(part) for part in text.split(",")]


@dataclass(frozen=True)
class Measured:
    """The figures of one size.

    Attributes:
        workers: number of worker processes; 0: the envs were in this process.
        envs: number of envs in each process.
        steps: number of steps of each env in a rollout.
        bare: frames/s of the bare loops together, the median of their windows.
        collector: frames/s of the collector, the median of its windows.
        ratios: frames/s of the collector over those of the bare loops, of each pair.
        bound: what the collector is bound by while nothing else takes time, see
            :class:`~distcollect.Bottleneck`.
        bottleneck: the same in words, and what would help.
    """

    workers: int
    envs: int
    steps: int
    bare: float
    collector: float
    ratios: list[float]
    bound: str
    bottleneck: str


def run(given: argparse.Namespace) -> int:
    """Measure all sizes and print a table; 0.

    Raises:
        ArgumentError: an argument is wrong; nothing was started.
        DistCollectError: an env or the policy raised.
    """
    import_from_here()
    policy = named_policy(given.policy, given.weights, trust=given.trust_policy)
    make_env = _env_maker(given.env)
    torch.set_num_threads(1)  # as in workers
    found = []
    for num_workers in given.workers:
        for num_envs in given.envs:
            show_progress(f"{num_workers} worker(s), {num_envs} env(s) ...")
            what = make_env, policy.factory, num_workers, num_envs
            found.append(measure(*what, seconds=given.seconds, pairs=given.pairs))
    show_progress("")
    print(table(found))
    if given.json is not None:
        about = {"env": given.env, "policy": given.policy or "random", "seconds": given.seconds}
        given.json.write_text(json.dumps({**about, "sizes": [asdict(m) for m in found]}, indent=1))
    return 0


def _env_maker(given: str) -> Maker:
    """What makes the env that ``given`` names, which was tried.

    Raises:
        ArgumentError: there is no such env, it can't be made, or is not a single Gymnasium env.
    """
    maker = named_env(given)
    env = tried_env(given, maker)
    if not isinstance(env, gym.Env):
        raise ArgumentError(
            f"--env {given} makes a {type(env).__name__}: bench steps single Gymnasium envs; name "
            "one, or what makes one"
        )
    env.close()
    return first_env_maker(maker)


def measure(
    make_env: Maker,
    make_policy: Maker | None,
    num_workers: int,
    num_envs: int,
    *,
    seconds: float,
    pairs: int,
) -> Measured:
    """Measure one size: a collector beside bare loops, in turn."""
    with contextlib.ExitStack() as stack:
        loop = stack.enter_context(contextlib.closing(BareLoop(make_env, make_policy, num_envs)))
        bare: Window = loop.window
        options: dict[str, Any] = {
            "policy_factory": make_policy,
            "frames_per_batch": num_envs * loop.num_steps,
            "envs_per_worker": num_envs,
            "monitor": dc.Monitor(view=False),
        }
        kind: Any = dc.SyncDataCollector
        if num_workers:
            what = make_env, make_policy, num_workers, num_envs, loop.num_steps
            bare = stack.enter_context(loop_processes(*what))
            kind = partial(dc.MultiaSyncDataCollector, num_workers=num_workers)
        collector = stack.enter_context(kind(make_env, **options))

        def collect(seconds: float) -> float:
            # Rollouts that were ready, or begun, before the window don't count.
            for _ in range(_WARM_UP_ROLLOUTS * max(1, num_workers)):
                collector.next()
            return _rate(lambda: int(collector.next().numel()), seconds)

        collect(max(seconds, _TELLING_S))
        # Now, as the windows of bare loops would count as the trainer's own work.
        # Here none could publish weights.
        bottleneck = find_bottleneck(replace(collector.stats(), has_weights=False))
        rates: dict[Window, list[float]] = {bare: [], collect: []}
        for pair in range(pairs):
            for window in (bare, collect) if pair % 2 else (collect, bare):
                rates[window].append(window(seconds))
    return Measured(
        num_workers,
        num_envs,
        loop.num_steps,
        statistics.median(rates[bare]),
        statistics.median(rates[collect]),
        [above / below for above, below in zip(rates[collect], rates[bare], strict=True)],
        bottleneck.bound,
        str(bottleneck),
    )


def _rate(work: Callable[[], int], seconds: float) -> float:
    """The frames/s of ``work``, which makes some frames and returns their number."""
    frames, begin = 0, time.perf_counter()
    while not frames or time.perf_counter() - begin < seconds:
        frames += work()
    return frames / (time.perf_counter() - begin)


class BareLoop:
    """n envs, a policy, and memory for one rollout, which is written over and over.

    Attributes:
        num_steps: T.
    """

    def __init__(
        self,
        make_env: Maker,
        make_policy: Maker | None,
        num_envs: int,
        num_steps: int | None = None,
    ) -> None:
        """Make the envs and the policy.

        Args:
            make_env: makes an env.
            make_policy: makes the policy; None: random actions.
            num_envs: n.
            num_steps: T; None: as many as make a rollout of good length.
        """
        self._envs = [make_env() for _ in range(num_envs)]
        self._space = self._envs[0].observation_space
        self._action_space = self._envs[0].action_space
        branches = (gym.spaces.Dict, gym.spaces.Tuple)
        self._has_parts = isinstance(self._space, branches)
        self._action_has_parts = isinstance(self._action_space, branches)
        # What the policy sees, ``[n, *obs]`` for each leaf.
        leaves = leaves_of(self._space, "observation")
        seen = {leaf.key: leaf.zeros(num_envs) for leaf in leaves}
        self._seen = list(seen.values())
        for row, env in enumerate(self._envs):
            self._observe(row, env.reset()[0])
        self._policy: Policy = RandomPolicy(self._action_space, num_envs)
        if make_policy is not None:
            self._policy = UserPolicy(make_policy(), seen, self._space, self._action_space)
        self._policy.try_out()
        self._final: list[Any] = []
        self._allocate(_TRIAL_STEPS)
        if num_steps is None:
            self.rollout()
            per_rollout_s = self.rollout() / _rate(self.rollout, 2 * _ROLLOUT_S)
            num_steps = min(max(1, round(_TRIAL_STEPS * _ROLLOUT_S / per_rollout_s)), _MOST_STEPS)
        self._allocate(num_steps)

    def _allocate(self, num_steps: int) -> None:
        self.num_steps = num_steps
        rows = len(self._envs)
        leaves = (*leaves_of(self._action_space, "action"), *self._policy.extras)
        self._observations = [
            np.zeros((num_steps, *array.shape), array.dtype) for array in self._seen
        ]
        self._chosen = [leaf.zeros(num_steps, rows) for leaf in leaves]
        self._reward = np.zeros((num_steps, rows), np.float32)
        self._ended = np.zeros((2, num_steps, rows), bool)

    def close(self) -> None:
        """Close the envs."""
        for env in self._envs:
            env.close()

    def window(self, seconds: float) -> float:
        """Collect for ``seconds``; the frames/s."""
        self.rollout()
        return _rate(self.rollout, seconds)

    def rollout(self) -> int:
        """Collect a rollout; the number of frames."""
        self._final.clear()
        with self._policy.exploring():
            for step in range(self.num_steps):
                for array, seen in zip(self._observations, self._seen, strict=True):
                    array[step] = seen
                actions, extras = self._policy()
                for array, value in zip(self._chosen, (*actions, *extras), strict=True):
                    array[step] = value
                self._step(step, actions)
        return self._reward.size

    def _step(self, step: int, actions: Sequence[np.ndarray]) -> None:
        reward, terminated, truncated = self._reward[step], *self._ended[:, step]
        for row, env in enumerate(self._envs):
            action = actions[0][row]
            if self._action_has_parts:
                action = unflatten(self._action_space, (array[row] for array in actions))
            observation, reward[row], terminated[row], truncated[row], _ = env.step(action)
            if terminated[row] or truncated[row]:
                self._final.append((step, row, observation))
                observation = env.reset()[0]
                if self._policy.state is not None:
                    self._policy.state.begin([row])
            self._observe(row, observation)

    def _observe(self, row: int, observation: Any) -> None:
        if not self._has_parts:
            self._seen[0][row] = observation
            return
        for array, part in zip(self._seen, flatten(self._space, observation), strict=True):
            array[row] = part


@contextlib.contextmanager
def loop_processes(
    make_env: Maker, make_policy: Maker | None, num_processes: int, num_envs: int, num_steps: int
) -> Iterator[Window]:
    """Start bare loops, in a process each; yield what lets all of them collect at once.

    Raises:
        LaunchError: a process ended or hangs.
    """
    made = cloudpickle.dumps(partial(BareLoop, make_env, make_policy, num_envs, num_steps))
    context = multiprocessing.get_context("spawn")
    loops: list[tuple[Connection, SpawnProcess]] = []

    def answers(timeout_s: float) -> list[float]:
        deadline = time.monotonic() + timeout_s
        try:
            for pipe, _ in loops:
                if not pipe.poll(max(0.0, deadline - time.monotonic())):
                    raise LaunchError(f"a bare loop did not answer within {timeout_s:g} s")
            return [pipe.recv() for pipe, _ in loops]
        except (EOFError, OSError) as error:
            raise LaunchError("a process with a bare loop ended: its error is above") from error

    def window(seconds: float) -> float:
        for pipe, _ in loops:
            pipe.send(seconds)
        return sum(answers(seconds + _ANSWER_S))

    try:
        for _ in range(num_processes):
            ours, theirs = context.Pipe()
            with theirs:
                process = context.Process(target=_serve_loop, args=(theirs, made))
                process.start()
            loops.append((ours, process))
        answers(_ANSWER_S)
        yield window
    finally:
        for pipe, _ in loops:
            pipe.close()
        for _, process in loops:
            process.join(1.0)
            process.kill()
            process.join()


def _serve_loop(pipe: Connection, made: bytes) -> None:
    """Run a bare loop's windows, until the other end closes the pipe."""
    torch.set_num_threads(1)
    with (
        contextlib.suppress(EOFError, KeyboardInterrupt),
        contextlib.closing(cloudpickle.loads(made)()) as loop,
    ):
        pipe.send(0.0)
        while True:
            pipe.send(loop.window(pipe.recv()))


def table(found: Sequence[Measured]) -> str:
    """A row for each size, and below them what the collectors are bound by, in words."""
    head = ("workers", "envs", "bare loop/s", "collector/s", "ratio", "min .. max", "bound by")
    rows = [list(head)]
    notes = []
    for size in found:
        workers = str(size.workers) if size.workers else "in process"
        rates = f"{size.bare:,.0f}", f"{size.collector:,.0f}"
        ratio = f"{statistics.median(size.ratios):.2f}"
        spread = f"{min(size.ratios):.2f} .. {max(size.ratios):.2f}"
        # As the text calls it, where nothing is sent.
        bound = "frames" if (size.workers, size.bound) == (0, "network") else size.bound
        rows.append([workers, str(size.envs), *rates, ratio, spread, bound])
        notes.append(f"{size.workers} worker(s), {size.envs} env(s): {size.bottleneck}")
    return "\n".join([text_table(rows, left=(6,)), "", *notes])


def show_progress(text: str) -> None:
    """Show a line in place of the last one, on a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
