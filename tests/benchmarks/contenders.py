"""Bare loops and distcollect's collectors on a workload, in a process that ends right afterwards.

What steps envs in one process uses one thread of torch there. The limit of W workers is W bare
loops side by side, in a process each: workers whose communication costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

import distcollect as dc
from benchmarks.items import Values
from benchmarks.windows import Batch, frames_per_s
from benchmarks.workloads import SLEEPING, SLEEPING_IMAGES, WORKLOADS, Workload
from distcollect.commands.bench import BareLoop, loop_processes

_RANDOM_STEPS = 128


def arguments(workload: Workload, **options: Any) -> dict[str, Any]:
    """The arguments of an endless collector whose rollouts have the size of the workload."""
    return {
        "create_env_fn": workload.make_env,
        "policy": workload.make_policy(),
        "frames_per_batch": workload.rollout_frames,
        "envs_per_worker": workload.num_envs,
        "monitor": dc.Monitor(view=False),
        **options,
    }


def counted(collector: Iterable[Any]) -> Iterator[Batch]:
    """The worker and the frames of each batch."""
    for batch in collector:
        yield int(batch["collector", "worker_id"].flatten()[0]), batch.numel()


def bare_loop(workload: Workload) -> BareLoop:
    """A bare loop in this process."""
    sizes = workload.num_envs, workload.num_steps
    return BareLoop(workload.make_env, workload.make_policy, *sizes)


def run_bare(seconds: float, *, name: str, num_processes: int) -> Values:
    """Bare loops side by side; their frames/s together."""
    workload = WORKLOADS[name]
    makers = workload.make_env, workload.make_policy
    sizes = num_processes, workload.num_envs, workload.num_steps
    with loop_processes(*makers, *sizes) as window:
        return {"frames_per_s": window(seconds)}


def run_sync(seconds: float, *, name: str) -> Values:
    """SyncDataCollector."""
    torch.set_num_threads(1)
    with dc.SyncDataCollector(**arguments(WORKLOADS[name])) as collector:
        return {"frames_per_s": frames_per_s(counted(collector), seconds)}


def run_workers(seconds: float, *, name: str, kind: str, **options: Any) -> Values:
    """A collector of that name; the trainer only counts."""
    given = arguments(WORKLOADS[name], **options)
    if kind == "MultiSyncDataCollector" or options.get("sync"):
        given["frames_per_batch"] *= options["num_workers"]  # rollouts have the same size
    with getattr(dc, kind)(**given) as collector:
        return {"frames_per_s": frames_per_s(counted(collector), seconds)}


def run_inference(seconds: float, *, where: str, images: bool) -> Values:
    """Policies in each worker, or in an inference server; ``images``: 8 workers, and a CNN."""
    workload, num_workers = (SLEEPING_IMAGES, 8) if images else (WORKLOADS["cartpole-1"], 1)
    given = arguments(workload, num_workers=num_workers, inference=dc.Inference(where))
    with dc.MultiaSyncDataCollector(**given) as collector:
        values = {"frames_per_s": frames_per_s(counted(collector), seconds)}
        stats = collector.stats()
    served = stats.inference
    if served.num_answers:
        values |= {"queue_ms": served.queue_s * 1e3, "forward_ms": served.forward_s * 1e3}
        values |= {"envs_at_once": served.num_envs, "fill": served.fill}
    return values


def run_sleeping(seconds: float, *, num_workers: int, random: bool) -> Values:
    """Workers whose envs sleep in each step.

    ``random``: they have no policy, and longer rollouts. The policy of the workload takes several
    times as much CPU as all else, so that a small machine shows little but that.
    """
    workload = replace(SLEEPING, num_steps=_RANDOM_STEPS) if random else SLEEPING
    given = arguments(workload, num_workers=num_workers)
    if random:
        given["policy"] = None
    with dc.RPCDataCollector(**given) as collector:
        return {"frames_per_s": frames_per_s(counted(collector), seconds)}
