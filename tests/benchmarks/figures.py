"""Scaling, bytes on the wire, and the CPU time of processes that wait.

Each function runs in a process of its own, which is the trainer.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.contenders import (
    DROWSY,
    NUM_WORKERS,
    Values,
    make_rpc,
    run_rpc,
)
from benchmarks.workloads import WORKLOADS
from distcollect.engine.build import build_engine
from distcollect.engine.plan import WorkerPlan
from distcollect.rollout.assemble import assemble
from distcollect.rollout.header import Header, Rollout
from distcollect.rollout.slabs import new_slab

_TICKS = os.sysconf("SC_CLK_TCK")
_RANDOM_STEPS = 128


def run_scaling(seconds: float, num_workers: int, *, random: bool = False) -> Values:
    """The "frames_per_s" of ``num_workers`` workers together; their envs sleep in each step.

    ``random``: they have no policy, and longer rollouts. The policy of the workload takes several
    times as much CPU as all else, so that a small machine shows little but that.
    """
    workload = WORKLOADS["sleep-5ms"]
    if random:
        workload = replace(workload, make_policy=_no_policy, num_steps=_RANDOM_STEPS)
    return run_rpc(workload, seconds, sync=False, num_workers=num_workers)


def _no_policy() -> Any:
    return None


def run_wire(seconds: float) -> Values:
    """Bytes of an Atari rollout's tensors on the wire, and bytes of one copy of its data.

    One copy: for each frame the observation, the action, what the policy wrote, reward, terminated,
    truncated, trajectory id and version, with the dtypes of the batch.
    """
    workload = WORKLOADS["atari"]
    engine = build_engine(
        WorkerPlan(workload.make_env, workload.num_envs, policy=workload.make_policy()),
        traj_ids=itertools.count(),
    )
    on_wire = one_copy = 0
    try:
        slab = new_slab(engine.layout, workload.num_steps)
        end = time.monotonic() + seconds
        while not on_wire or time.monotonic() < end:
            engine.collect(slab)
            tensors = slab.tensors()
            header = Header(0, 0, 0, slab.num_frames, slab.num_steps, 0, (0, 0))
            batch = assemble(engine.layout, [Rollout(header, tensors)])
            on_wire += sum(tensor.nbytes for tensor in tensors)
            following, collector = batch["next"], batch["collector"]
            kept = [
                batch["observation"],
                batch["action"],
                batch["action_log_prob"],
                following["reward"],
                following["terminated"],
                following["truncated"],
                collector["traj_ids"],
                collector["policy_version"],
            ]
            one_copy += sum(tensor.nbytes for tensor in kept)
    finally:
        engine.close()
    return {"bytes_on_wire": on_wire, "bytes_of_one_copy": one_copy}


def run_waiting_trainer(seconds: float) -> Values:
    """CPU time of a trainer that waits in ``next()``, per second."""
    with make_rpc(DROWSY, sync=False, num_workers=NUM_WORKERS) as collector:
        for _ in range(2 * NUM_WORKERS):
            collector.next()
        cpu, begin = time.process_time(), time.perf_counter()
        while time.perf_counter() - begin < seconds:
            collector.next()
        elapsed = time.perf_counter() - begin
        return {"core_share": (time.process_time() - cpu) / elapsed}


def run_idle_worker(seconds: float) -> Values:
    """CPU time of a worker without a request, per second; the busier one of two."""
    workload = WORKLOADS["cartpole-16"]
    with make_rpc(workload, sync=True, num_workers=NUM_WORKERS) as collector:
        collector.next()
        pids = worker_pids()
        before = [cpu_s(pid) for pid in pids]
        begin = time.perf_counter()
        threading.Event().wait(max(seconds, 1.0))  # a clock tick of CPU is 10 ms
        elapsed = time.perf_counter() - begin
        after = [cpu_s(pid) for pid in pids]
    return {"core_share": max(b - a for a, b in zip(before, after, strict=True)) / elapsed}


def worker_pids() -> list[int]:
    """Ids of the worker processes that this process has started."""
    pids = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parent = int(_stat(int(folder.name))[1])
                command = (folder / "cmdline").read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if parent == os.getpid() and b"distcollect.worker.main" in command:
                pids.append(int(folder.name))
    return sorted(pids)


def cpu_s(pid: int) -> float:
    """CPU time of a process in user and system mode, in seconds."""
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _stat(pid: int) -> list[str]:
    """The fields of ``/proc/PID/stat`` after the process's name, which may hold spaces."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
