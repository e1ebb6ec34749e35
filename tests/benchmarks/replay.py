"""Who fills a replay buffer best: the trainer's thread, or the processes that step the envs.

distcollect's trainer has a thread that adds rollouts of its workers. TorchRL's workers write to the
buffer themselves, under a lock that all share. The limit of that is processes of their own that
each write to a buffer of their own: no lock, no trainer, nothing moved between processes.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.contenders import arguments
from benchmarks.items import Values
from benchmarks.peers import make_torchrl
from benchmarks.windows import cpu_s
from benchmarks.workloads import WORKLOADS
from distcollect import MultiaSyncDataCollector, SyncDataCollector

_SIZES = {"cartpole-16": 20_000, "pixels": 2_048}  # of buffers, in frames
_TIMEOUT_S = 60.0
_NUM_WORKERS = 2


def run_by_trainer(seconds: float, name: str) -> Values:
    """Two workers; the trainer's thread fills a buffer in mapped memory, while the trainer sleeps.

    Returns: as :func:`_measured`.
    """
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=_memory()) as folder:
        buffer = _mapped_buffer(name, folder)
        options = {"num_workers": _NUM_WORKERS, "replay_buffer": buffer}
        with MultiaSyncDataCollector(**arguments(WORKLOADS[name], **options)) as collector:
            collector.start()
            return _measured(lambda: int(buffer.write_count), name, seconds)


def run_by_torchrl(seconds: float, name: str) -> Values:
    """TorchRL's ``MultiAsyncCollector``, whose two workers write to a shared buffer.

    Returns: as :func:`_measured`.
    """
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=_memory()) as folder:
        buffer = _mapped_buffer(name, folder, shared=True)
        options = {"replay_buffer": buffer}
        collector = make_torchrl("MultiAsyncCollector", WORKLOADS[name], _NUM_WORKERS, **options)
        collector.start()
        return _measured(lambda: int(buffer.write_count), name, seconds)


def run_by_themselves(seconds: float, name: str) -> Values:
    """Two processes that each step envs, and write to a buffer in mapped memory of their own.

    Returns: as :func:`_measured`.
    """
    context = multiprocessing.get_context("spawn")
    counts = [context.Value("q", 0, lock=False) for _ in range(_NUM_WORKERS)]
    for count in counts:
        context.Process(target=_fill_alone, args=(name, count), daemon=True).start()
    return _measured(lambda: sum(count.value for count in counts), name, seconds)


def _fill_alone(name: str, count: Any) -> None:
    torch.set_num_threads(1)
    with (
        tempfile.TemporaryDirectory(dir=_memory()) as folder,
        SyncDataCollector(**arguments(WORKLOADS[name])) as collector,
    ):
        buffer = _mapped_buffer(name, folder)
        while True:
            buffer.extend(collector.next().reshape(-1))
            count.value = buffer.write_count


def _mapped_buffer(name: str, folder: str, **options: Any) -> Any:
    data = importlib.import_module("torchrl.data")
    storage = data.LazyMemmapStorage(_SIZES[name], scratch_dir=folder)
    return data.ReplayBuffer(storage=storage, **options)


def _memory() -> str | None:
    """A folder in memory, so that no disk is measured; None: the usual one."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _measured(written: Callable[[], int], name: str, seconds: float) -> Values:
    """The frames that ``written()`` counts, in time and in CPU time.

    Returns:
        "frames_per_s", "frames_per_cpu_s" of this process and all that it started, "core_share":
        CPU time of this process per second.
    """
    _await(lambda: written() >= 6 * WORKLOADS[name].rollout_frames)
    frames, begin = written(), time.perf_counter()
    own_s, all_s = time.process_time(), cpu_s()
    time.sleep(seconds)
    elapsed, frames = time.perf_counter() - begin, written() - frames
    return {
        "frames_per_s": frames / elapsed,
        "frames_per_cpu_s": frames / (cpu_s() - all_s),
        "core_share": (time.process_time() - own_s) / elapsed,
    }


def _await(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"no frames arrived within {_TIMEOUT_S:g} s")
        time.sleep(0.01)
