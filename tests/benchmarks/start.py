"""What it takes to start workers, from making a collector to its first batch.

All times are in seconds.
"""

from __future__ import annotations

import importlib
import os
import signal
import time
from pathlib import Path
from typing import Any

from benchmarks.items import Values
from benchmarks.peers import make_torchrl
from benchmarks.windows import children
from benchmarks.workloads import WORKLOADS, SleepingEnv
from distcollect import MultiSyncDataCollector, RPCDataCollector
from distcollect.launch.zygote import ZYGOTE

_FRAMES = 16  # of each worker
_WORKLOAD = WORKLOADS["cartpole-1"]
_LIMIT_S = 60.0


def _collector(num_workers: int) -> MultiSyncDataCollector:
    return MultiSyncDataCollector(
        [_WORKLOAD.make_env] * num_workers,
        _WORKLOAD.make_policy(),
        frames_per_batch=_FRAMES * num_workers,
    )


def run_start(_seconds: float, *, num_workers: int) -> Values:
    """Make two collectors one after the other: "first_s" and "second_s" to their first batches."""
    seconds = []
    for _ in range(2):
        begin = time.perf_counter()
        with _collector(num_workers) as collector:
            collector.next()
            seconds.append(time.perf_counter() - begin)
    return {"first_s": seconds[0], "second_s": seconds[1]}


def run_torchrl(_seconds: float, *, num_workers: int) -> Values:
    """``MultiSyncCollector``: "first_s" to its first batch."""
    importlib.import_module("torchrl.collectors")
    begin = time.perf_counter()
    options = {"frames_per_batch": _FRAMES * num_workers, "cat_results": 0}
    collector = make_torchrl("MultiSyncCollector", _WORKLOAD, num_workers, **options)
    next(iter(collector))
    first_s = time.perf_counter() - begin
    collector.shutdown()
    return {"first_s": first_s}


def run_replacement(_seconds: float) -> Values:
    """Kill one of two workers: "replaced_s" to the first frames of its replacement."""
    with RPCDataCollector(SleepingEnv, frames_per_batch=4, num_workers=2) as collector:
        pids = _await_pids(collector, {})
        begin = time.perf_counter()
        os.kill(pids[1], signal.SIGKILL)
        _await_pids(collector, {1: pids[1]})
        return {"replaced_s": time.perf_counter() - begin}


def _await_pids(collector: Any, but: dict[int, int]) -> dict[int, int]:
    """Collect until a frame has come from each of both workers, not from the processes ``but``."""
    pids: dict[int, int] = {}
    end = time.monotonic() + _LIMIT_S
    while len(pids) < 2:
        if time.monotonic() > end:
            raise TimeoutError(f"no frame of a replacement within {_LIMIT_S:g} s")
        batch = collector.next()
        worker_id = int(batch["collector", "worker_id"][0, 0])
        pid = int(batch["observation"][0, -1, 0])
        if but.get(worker_id) != pid:
            pids[worker_id] = pid
    return pids


def run_memory(_seconds: float, *, use: str) -> Values:
    """What eight idle workers add: "mb_per_worker" of proportional set size (PSS)."""
    os.environ[ZYGOTE] = use
    sizes = []
    for num_workers in (1, 9):
        with _collector(num_workers) as collector:
            collector.next()
            sizes.append(sum(_pss_bytes(pid) for pid in _descendants(os.getpid())))
    return {"mb_per_worker": (sizes[1] - sizes[0]) / 8 / 1e6}


def _descendants(pid: int) -> list[int]:
    return [each for child in children(pid) for each in (child, *_descendants(child))]


def _pss_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024
