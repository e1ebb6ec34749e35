"""What failures cost: workers that are killed, stopped or slow. Their envs sleep in each step.

Each function runs in a process of its own, which is the trainer. All times are in seconds.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from benchmarks.contenders import Values
from distcollect import EnvContext, Faults, RPCDataCollector, WorkerState

_STEP_S = 0.005
_T = 20
_SLOWER = 5
_LIMIT_S = 120.0
_PAGE = os.sysconf("SC_PAGE_SIZE")
_KILLS = 200
_KILLED_TOGETHER = 4


class Sleeper(gym.Env[np.ndarray, np.int64]):
    """Its observation is the id of its process; a step sleeps for ``pause_s`` seconds."""

    observation_space = spaces.Box(0, np.inf, (1,), np.float64)
    action_space = spaces.Discrete(2)

    def __init__(self, pause_s: float = _STEP_S) -> None:
        self.pause_s = pause_s

    def reset(self, **_: Any) -> tuple[np.ndarray, dict[str, Any]]:
        """See :class:`gymnasium.Env`."""
        return np.full(1, os.getpid(), np.float64), {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """See :class:`gymnasium.Env`."""
        time.sleep(self.pause_s)
        return np.full(1, os.getpid(), np.float64), 1.0, False, False, {}


def make_straggler(context: EnvContext) -> Sleeper:
    """Make an env that is slower in the last of eight workers."""
    return Sleeper(_STEP_S * (_SLOWER if context.worker_id == 7 else 1))


class _Run:
    """An asynchronous collector, and the process id of each worker."""

    def __init__(self, num_workers: int, **faults: Any) -> None:
        self.collector = RPCDataCollector(
            Sleeper, frames_per_batch=_T, num_workers=num_workers, faults=Faults(**faults)
        )
        self.pids: dict[int, int] = {}
        self.until(lambda: len(self.pids) == num_workers)

    def until(self, holds: Callable[[], bool]) -> float:
        """Collect until ``holds()``; return the seconds that took."""
        begin = time.perf_counter()
        while not holds():
            self.next()
            if time.perf_counter() - begin > _LIMIT_S:
                raise TimeoutError(
                    f"nothing changed for {_LIMIT_S:g} s: {self.collector.worker_states}"
                )
        return time.perf_counter() - begin

    def next(self) -> None:
        """Take a batch."""
        batch = self.collector.next()
        worker_id = int(batch["collector", "worker_id"][0, 0])
        self.pids[worker_id] = int(batch["observation"][0, -1, 0])

    def frames_per_s(self, seconds: float) -> float:
        """Frames per second over a window of ``seconds``."""
        count, begin = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - begin) < seconds:
            self.next()
            count += _T
        return count / elapsed

    def injure(self, worker_id: int, number: signal.Signals) -> float:
        """Send a signal to a worker; return the seconds until it counted as lost."""
        os.kill(self.pids[worker_id], number)
        return self.until(
            lambda: (
                self.collector.worker_states[worker_id]
                not in (WorkerState.READY, WorkerState.SUSPECTED)
            )
        )


def run_survivors(seconds: float) -> Values:
    """Kill one of four workers: frames/s "before" and "after", "seen_s" until it counts as lost."""
    run = _Run(4, max_restarts=0)
    with run.collector:
        before = run.frames_per_s(seconds)
        seen_s = run.injure(3, signal.SIGKILL)
        after = run.frames_per_s(seconds)
    return {"before": before, "after": after, "seen_s": seen_s}


def run_stopped(_seconds: float) -> Values:
    """Stop one of two workers by a signal: "seen_s" until it counts as lost."""
    run = _Run(2, max_restarts=0)
    with run.collector:
        return {"seen_s": run.injure(1, signal.SIGSTOP)}


def run_recovery(_seconds: float) -> Values:
    """Kill a worker and wait for its replacement.

    "recovery_s": from the kill to the replacement's first frames. "cold_s": from the making of
    another collector, with one worker, to its first batch. Three other workers step their envs
    during both.
    """
    run = _Run(4)
    with run.collector:
        recoveries = []
        for worker_id in (
            1,
            2,
            3,
        ):  # the first kill of each: replacing it again would be delayed on purpose
            killed = run.pids[worker_id]
            begin = time.perf_counter()
            run.injure(worker_id, signal.SIGKILL)
            run.until(lambda w=worker_id, pid=killed: run.pids[w] != pid)  # type: ignore[misc]
            recoveries.append(time.perf_counter() - begin)
        starts: list[float] = []

        def start_cold() -> None:
            starts.extend(_start_one() for _ in range(3))

        run.collector.release(3)
        thread = threading.Thread(target=start_cold)
        thread.start()
        run.until(lambda: not thread.is_alive())
        thread.join()
    return {"recovery_s": median(recoveries), "cold_s": median(starts)}


def _start_one() -> float:
    """Start another trainer; seconds from making its collector to its first batch."""
    found = subprocess.run([sys.executable, "-c", _COLD], check=True, stdout=subprocess.PIPE)
    return float(found.stdout)


_COLD = """
import time
from distcollect import RPCDataCollector
from benchmarks.faults import Sleeper
begin = time.perf_counter()
with RPCDataCollector(Sleeper, frames_per_batch=20, num_workers=1) as collector:
    collector.next()
    print(time.perf_counter() - begin)
"""


def run_churn(_seconds: float) -> Values:
    """Kill and replace workers 200 times, four at a time, and see what the trainer keeps.

    "mb_per_kill": growth of its memory; "threads" and "descriptors": how many more it has at the
    end.
    """
    run = _Run(_KILLED_TOGETHER, max_restarts=_KILLS, restart_pause_s=0.1)
    with run.collector:

        def kill_all() -> None:
            killed = dict(run.pids)
            for pid in killed.values():
                os.kill(pid, signal.SIGKILL)
            run.until(lambda: not {*killed.values()} & {*run.pids.values()})

        kill_all()  # makes what is made once and used again
        before = _holdings()
        for _ in range(_KILLS // _KILLED_TOGETHER):
            kill_all()
        after = _holdings()
    grown, threads, descriptors = (b - a for a, b in zip(before, after, strict=True))
    return {"mb_per_kill": grown / 1e6 / _KILLS, "threads": threads, "descriptors": descriptors}


def _holdings() -> tuple[float, int, int]:
    """Bytes of memory, threads and open files of this process."""
    gc.collect()
    num_bytes = int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE
    return num_bytes, threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))


def run_straggler(seconds: float, *, slow: bool) -> Values:
    """The "frames_per_s" of eight workers in sync mode with ``preemptive_threshold=0.75``.

    Padding doesn't count. ``slow``: one worker takes five times as long for a step.
    """
    with RPCDataCollector(
        make_straggler if slow else Sleeper,
        frames_per_batch=8 * _T,
        num_workers=8,
        sync=True,
        preemptive_threshold=0.75,
    ) as collector:
        for _ in range(3):
            collector.next()
        frames, begin = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - begin) < seconds:
            frames += int(collector.next()["collector", "mask"].sum())
        return {"frames_per_s": frames / elapsed}
