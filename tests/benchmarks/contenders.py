"""The contenders on a workload: the bare loop, distcollect, and its peers.

Each contender takes a workload and the length of the window in seconds, and returns
``{"frames_per_s": ...}``. It runs in a process of its own that ends right afterwards. Peers are
therefore not shut down, which may hang: their processes are killed anyway.

A contender that steps envs in one process uses one thread of torch there, as each bare loop does.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch

from benchmarks import peers
from benchmarks.bare import run_bare
from benchmarks.windows import Batch, frames_per_s
from benchmarks.workloads import Workload, make_drowsy, small_policy
from distcollect import (
    MultiaSyncDataCollector,
    MultiSyncDataCollector,
    RPCDataCollector,
    SyncDataCollector,
    aSyncDataCollector,
)
from distcollect.commands.collect.saved import SavedFrames

Values: TypeAlias = "dict[str, float]"

NUM_WORKERS = 2
# The policy always sees the same shapes, so it needs no guards. Those of a network this small take
# as long as the network itself.
COMPILE_OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = (
    {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
    if hasattr(torch.compiler, "skip_all_guards_unsafe")  # not in torch 2.8
    else {}
)


@dataclass(frozen=True)
class Contender:
    """One way to collect.

    Attributes:
        name: its name on the command line; "x2" means two workers.
        about: a description for the report.
        run: measures it.
        baseline: the contender that is its limit.
        needs: modules that must be installed.
        only: names of the workloads that it is measured on; None: all.
    """

    name: str
    about: str
    run: Callable[[Workload, float], Values]
    baseline: str = "bare"
    needs: tuple[str, ...] = ()
    only: tuple[str, ...] | None = None


def run_sync(workload: Workload, seconds: float, *, compiled: bool = False) -> Values:
    """SyncDataCollector; ``compiled``: with a policy compiled by ``torch.compile``."""
    torch.set_num_threads(1)
    policy: Any = workload.make_policy()
    if compiled:
        policy = torch.compile(policy, options=COMPILE_OPTIONS)
    with make_sync(workload, policy) as collector:
        return {"frames_per_s": frames_per_s(_counted(collector), seconds)}


def run_rpc(
    workload: Workload, seconds: float, *, sync: bool, num_workers: int = NUM_WORKERS
) -> Values:
    """RPCDataCollector; the trainer only counts."""
    with make_rpc(workload, sync=sync, num_workers=num_workers) as collector:
        return {"frames_per_s": frames_per_s(_counted(collector, by_worker=not sync), seconds)}


def run_local(
    workload: Workload, seconds: float, *, kind: type[RPCDataCollector], num_workers: int = 1
) -> Values:
    """One of the collectors whose workers are local processes; the trainer only counts."""
    together = num_workers if kind is MultiSyncDataCollector else 1
    options: dict[str, Any] = {} if kind is aSyncDataCollector else {"num_workers": num_workers}
    with kind(
        workload.make_env,
        workload.make_policy(),
        frames_per_batch=workload.rollout_frames * together,
        envs_per_worker=workload.num_envs,
        **options,
    ) as collector:
        batches = _counted(collector, by_worker=together == 1)
        return {"frames_per_s": frames_per_s(batches, seconds)}


_SAVED_ROLLOUTS = 50  # in each folder


def run_saved(workload: Workload, seconds: float) -> Values:
    """RPCDataCollector(sync=False) that writes frames to disk, as ``distcollect collect`` does."""
    with make_rpc(workload, sync=False, num_workers=NUM_WORKERS) as collector:
        return {"frames_per_s": frames_per_s(_saved(collector, workload), seconds)}


def _saved(collector: RPCDataCollector, workload: Workload) -> Iterator[Batch]:
    while True:
        num_frames = _SAVED_ROLLOUTS * workload.rollout_frames
        with (
            tempfile.TemporaryDirectory(dir=".") as folder,
            SavedFrames(Path(folder), num_frames, {}) as saved,
        ):
            saved.begin()
            while not saved.is_complete:
                batch = collector.next()
                yield int(batch["collector", "worker_id"][0, 0]), saved.add(batch)


def make_sync(workload: Workload, policy: Any, **options: Any) -> SyncDataCollector:
    """An endless collector with rollouts of the workload's size; ``options`` are more arguments."""
    return SyncDataCollector(
        workload.make_env,
        policy,
        frames_per_batch=workload.rollout_frames,
        envs_per_worker=workload.num_envs,
        **options,
    )


def make_rpc(
    workload: Workload, *, sync: bool, num_workers: int, **options: Any
) -> RPCDataCollector:
    """An endless collector with rollouts of the workload's size; ``options`` are more arguments."""
    return RPCDataCollector(
        workload.make_env,
        workload.make_policy(),
        frames_per_batch=workload.rollout_frames * (num_workers if sync else 1),
        num_workers=num_workers,
        envs_per_worker=workload.num_envs,
        sync=sync,
        **options,
    )


def _counted(collector: Iterable[Any], *, by_worker: bool = False) -> Iterator[Batch]:
    for batch in collector:
        source = int(batch["collector", "worker_id"].flatten()[0]) if by_worker else 0
        yield source, batch.numel()


_TORCHRL = ("torchrl",)
# They are RPCDataCollector with batches of another shape: these workloads show the difference.
_LOCAL = ("cartpole-1", "cartpole-16", "atari")

CONTENDERS: dict[str, Contender] = {
    contender.name: contender
    for contender in (
        Contender("bare", "bare loop, 1 process", partial(run_bare, num_processes=1)),
        Contender(
            "bare-x2",
            "2 bare loops side by side",
            partial(run_bare, num_processes=NUM_WORKERS),
            "bare-x2",
        ),
        Contender("sync", "distcollect.SyncDataCollector", run_sync),
        Contender(
            "sync-compiled",
            "the same, policy compiled",
            partial(run_sync, compiled=True),
            only=("cartpole-1", "cartpole-16"),
        ),
        Contender(
            "async",
            "distcollect.aSyncDataCollector, 1 worker",
            partial(run_local, kind=aSyncDataCollector),
            only=_LOCAL,
        ),
        Contender(
            "multi-sync-x2",
            "distcollect.MultiSyncDataCollector",
            partial(run_local, kind=MultiSyncDataCollector, num_workers=NUM_WORKERS),
            "bare-x2",
            only=_LOCAL,
        ),
        Contender(
            "multi-async-x2",
            "distcollect.MultiaSyncDataCollector",
            partial(run_local, kind=MultiaSyncDataCollector, num_workers=NUM_WORKERS),
            "bare-x2",
            only=_LOCAL,
        ),
        Contender(
            "rpc-sync-x2",
            "distcollect.RPCDataCollector(sync=True)",
            partial(run_rpc, sync=True),
            "bare-x2",
        ),
        Contender(
            "rpc-async-x2",
            "distcollect.RPCDataCollector(sync=False)",
            partial(run_rpc, sync=False),
            "bare-x2",
        ),
        Contender(
            "rpc-async-x2-disk",
            "the same, frames written to this folder's disk",
            run_saved,
            "rpc-async-x2",
            only=("cartpole-16", "atari"),
        ),
        Contender("torchrl", "torchrl Collector", peers.run_torchrl, needs=_TORCHRL),
        Contender(
            "torchrl-multisync-x2",
            "torchrl MultiSyncCollector",
            partial(peers.run_torchrl_multi, sync=True),
            "bare-x2",
            _TORCHRL,
        ),
        Contender(
            "torchrl-multiasync-x2",
            "torchrl MultiAsyncCollector",
            partial(peers.run_torchrl_multi, sync=False),
            "bare-x2",
            _TORCHRL,
        ),
        Contender(
            "torchrl-rpc-x2",
            'torchrl RPCCollector(launcher="mp")',
            peers.run_torchrl_rpc,
            "bare-x2",
            _TORCHRL,
        ),
        Contender("gym-sync", "gymnasium SyncVectorEnv loop", peers.run_gym_sync),
        Contender(
            "gym-async-x2",
            "gymnasium AsyncVectorEnv loop, 2n env processes",
            peers.run_gym_async,
            "bare-x2",
        ),
        Contender(
            "sb3-subproc-x2",
            "stable_baselines3 SubprocVecEnv loop, 2n env processes",
            peers.run_sb3,
            "bare-x2",
            ("stable_baselines3",),
        ),
    )
}

# Not a workload of its own.
DROWSY = Workload("sleep-20ms", "20 ms of sleep a step", make_drowsy, small_policy, 1, 32)
