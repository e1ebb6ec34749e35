"""What it costs the trainer to fill a replay buffer in the background."""

from __future__ import annotations

import importlib
import threading
import time
from typing import Any

import torch

from distcollect import aSyncDataCollector
from distcollect.commands.bench.contenders import Values
from distcollect.commands.bench.workloads import WORKLOADS

_SIZE = 20_000
_TIMEOUT_S = 60.0
_THREAD = "distcollect-collect"  # the thread that start() starts


def run_replay(seconds: float) -> Values:
    """Fill a replay buffer of TorchRL while the trainer sleeps.

    Returns:
        "frames_per_s" that arrive, and "core_share": CPU time of the thread that fills the buffer,
        per second. It needs the interpreter's lock for at most this share of the time.
    """
    data = importlib.import_module("torchrl.data")
    torch.set_num_threads(1)
    workload = WORKLOADS["cartpole-16"]
    buffer: Any = data.ReplayBuffer(storage=data.LazyTensorStorage(_SIZE))
    with aSyncDataCollector(
        workload.make_env,
        workload.make_policy(),
        frames_per_batch=workload.rollout_frames,
        envs_per_worker=workload.num_envs,
        replay_buffer=buffer,
    ) as collector:
        collector.start()
        deadline = time.monotonic() + _TIMEOUT_S
        while buffer.write_count < 2 * workload.rollout_frames:
            if time.monotonic() > deadline:
                raise RuntimeError(f"no frames arrived within {_TIMEOUT_S:g} s")
            time.sleep(0.01)
        thread = next(t for t in threading.enumerate() if t.name == _THREAD)
        frames, cpu_s, begin = buffer.write_count, _cpu_s(thread), time.perf_counter()
        time.sleep(seconds)
        elapsed = time.perf_counter() - begin
        return {
            "frames_per_s": (buffer.write_count - frames) / elapsed,
            "core_share": (_cpu_s(thread) - cpu_s) / elapsed,
        }


def _cpu_s(thread: threading.Thread) -> float:
    assert thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
