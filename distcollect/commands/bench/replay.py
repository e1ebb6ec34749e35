"""What it costs to fill a replay buffer in the background, and what training leaves of it."""

from __future__ import annotations

import contextlib
import importlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from distcollect import aSyncDataCollector
from distcollect.commands.bench.contenders import Values
from distcollect.commands.bench.workloads import WORKLOADS

_SIZE = 20_000
_SAMPLES = 256
_THREAD = "distcollect-collect"  # the one that start() starts


def run_idle(seconds: float) -> Values:
    """The trainer sleeps: "frames_per_s" that come in."""
    with _filled() as (buffer, _):
        return _measure(buffer, seconds, lambda: time.sleep(0.01))


def run_training(seconds: float) -> Values:
    """The trainer samples and takes optimiser steps without a pause.

    "frames_per_s" come in meanwhile, "steps_per_s" are taken, and the thread that fills the buffer
    computes for a "core_share" of the time: that much of the interpreter's lock it needs at most.
    """
    with _filled() as (buffer, learn):
        return _measure(buffer, seconds, learn)


@contextlib.contextmanager
def _filled() -> Iterator[tuple[Any, Callable[[], None]]]:
    """A buffer of TorchRL's that is being filled, and a step of training from it."""
    data = importlib.import_module("torchrl.data")
    torch.set_num_threads(1)
    workload = WORKLOADS["cartpole-16"]
    buffer = data.ReplayBuffer(storage=data.LazyTensorStorage(_SIZE), batch_size=_SAMPLES)
    policy = workload.make_policy()
    optimizer = torch.optim.Adam(policy.parameters(), 1e-4)

    def learn() -> None:
        _, chosen = policy(buffer.sample()["observation"])
        optimizer.zero_grad()
        (-chosen["action_log_prob"].mean()).backward()
        optimizer.step()

    with aSyncDataCollector(
        workload.make_env,
        policy,
        frames_per_batch=workload.rollout_frames,
        envs_per_worker=workload.num_envs,
        replay_buffer=buffer,
    ) as collector:
        collector.start()
        deadline = time.monotonic() + 60
        while buffer.write_count < 2 * workload.rollout_frames:
            if time.monotonic() > deadline:
                raise RuntimeError("no frames came in within 60 s")
            time.sleep(0.01)
        yield buffer, learn


def _measure(buffer: Any, seconds: float, step: Callable[[], None]) -> Values:
    thread = next(t for t in threading.enumerate() if t.name == _THREAD)
    frames, cpu_s = buffer.write_count, _cpu_s(thread)
    begin, steps = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - begin) < seconds:
        step()
        steps += 1
    return {
        "frames_per_s": (buffer.write_count - frames) / elapsed,
        "steps_per_s": steps / elapsed,
        "core_share": (_cpu_s(thread) - cpu_s) / elapsed,
    }


def _cpu_s(thread: threading.Thread) -> float:
    assert thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
