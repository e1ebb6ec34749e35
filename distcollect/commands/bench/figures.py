"""What a run costs beside frames/s: bytes on the wire, a waiting process's CPU, a worker's memory.

Each function is measured in a process of its own, which is the trainer.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from pathlib import Path

from distcollect.commands.bench.contenders import (
    DROWSY,
    NUM_WORKERS,
    SLEEPING,
    Values,
    make_rpc,
    run_rpc,
)
from distcollect.commands.bench.workloads import WORKLOADS, Workload
from distcollect.engine.build import build_engine
from distcollect.engine.plan import WorkerPlan
from distcollect.rollout.assemble import assemble
from distcollect.rollout.header import Header, Rollout
from distcollect.rollout.slab import Slab
from distcollect.transport.protocol import NUM_SLABS

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICK_S = 0.05  # between two looks at a worker's memory


def run_scaling(seconds: float, num_workers: int) -> Values:
    """``num_workers`` workers that step a sleeping env: "frames_per_s" of all."""
    return run_rpc(SLEEPING, seconds, sync=False, num_workers=num_workers)


def run_wire(seconds: float) -> Values:
    """Bytes of an Atari rollout's tensors as they travel, and of one copy of what is in it.

    One copy: for each frame the observation, the action, what the policy wrote, reward, terminated,
    truncated, trajectory id and version, as the batch has them.
    """
    workload = WORKLOADS["atari"]
    engine = build_engine(
        WorkerPlan(workload.make_env, workload.num_envs, policy=workload.make_policy()),
        traj_ids=itertools.count(),
    )
    on_wire = one_copy = 0
    try:
        slab = Slab(engine.layout, workload.num_steps)
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
    """CPU of a trainer that is blocked in ``next()``, as a share of a core."""
    with make_rpc(DROWSY, sync=False, num_workers=NUM_WORKERS) as collector:
        for _ in range(2 * NUM_WORKERS):
            collector.next()
        cpu, begin = time.process_time(), time.perf_counter()
        while time.perf_counter() - begin < seconds:
            collector.next()
        elapsed = time.perf_counter() - begin
        return {"core_share": (time.process_time() - cpu) / elapsed}


def run_idle_worker(seconds: float) -> Values:
    """CPU of a worker that nothing is asked of, as a share of a core; the busiest of two."""
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


def run_trainer(seconds: float) -> Values:
    """CPU that a trainer spends on a batch of 4096 frames, and the time in which they arrive."""
    workload: Workload = WORKLOADS["cartpole-16"]
    assert workload.rollout_frames == 4096
    with make_rpc(workload, sync=False, num_workers=NUM_WORKERS) as collector:
        for _ in range(2 * NUM_WORKERS):
            collector.next()
        cpu, begin, batches = time.process_time(), time.perf_counter(), 0
        while time.perf_counter() - begin < seconds:
            collector.next()
            batches += 1
        elapsed = time.perf_counter() - begin
        cpu = time.process_time() - cpu
    return {"cpu_s_per_batch": cpu / batches, "s_per_batch": elapsed / batches}


def run_memory(seconds: float) -> Values:
    """What a worker's memory grows by when the trainer takes one batch and asks no more.

    The rollouts have 32 frames of 1 MiB. The worker's memory is watched for a window after the last
    batch; the most counts. Its bound: slabs in flight times the rollout's size.
    """
    workload = WORKLOADS["big-obs"]
    with make_rpc(workload, sync=False, num_workers=1) as collector:
        (pid,) = worker_pids()
        before = rss_bytes(pid)
        batch = collector.next()
        pause = threading.Event()
        end = time.monotonic() + max(seconds, 1.0)
        most = rss_bytes(pid)
        while time.monotonic() < end:
            pause.wait(_TICK_S)
            most = max(most, rss_bytes(pid))
        rollout = batch["observation"].nbytes
    return {"growth_bytes": most - before, "bound_bytes": NUM_SLABS * rollout}


def worker_pids() -> list[int]:
    """The worker processes that this process has started."""
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
    """CPU that a process has used, in user and system mode, in seconds."""
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / _TICKS


def rss_bytes(pid: int) -> int:
    """Resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE


def _stat(pid: int) -> list[str]:
    """``/proc/PID/stat`` from the state on: the name before may hold spaces."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
