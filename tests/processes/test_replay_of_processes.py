"""A replay buffer that worker processes fill in the background."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from helpers.replay_buffers import Buffer, T
from helpers.waiting import eventually

import distcollect as dc


class Dies(gym.Wrapper):
    """Kills its process in its 30th step."""

    def __init__(self) -> None:
        super().__init__(gym.make("CartPole-v1"))
        self._left = 30

    def step(self, action: Any) -> Any:
        self._left -= 1
        if not self._left:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


def test_failure_of_what_collects_is_told() -> None:
    buffer = dc.RateLimited(Buffer(), 1.0, min_size=10_000)
    faults = dc.Faults(max_restarts=0)
    collector = dc.aSyncDataCollector(Dies, frames_per_batch=T, replay_buffer=buffer, faults=faults)
    collector.start()
    with pytest.raises(dc.CollectorStateError, match=r"no more frames come in: .*worker 0"):
        buffer.sample(4)
    for call in (collector.update_policy_weights_, collector.async_shutdown):
        with pytest.raises(dc.WorkerLost):
            call()


def test_one_that_is_dropped_ends() -> None:
    """A collector ends with its last reference; then another one can be made."""
    for _ in range(2):
        buffer = Buffer()
        collector = dc.aSyncDataCollector("CartPole-v1", frames_per_batch=T, replay_buffer=buffer)
        collector.start()
        eventually(lambda: len(buffer))  # noqa: B023 - called at once
        del collector
        eventually(lambda: "distcollect-collect" not in {t.name for t in threading.enumerate()})


class Counted(gym.Env[Any, Any]):
    """Each pixel of its observation is the number of the step, modulo 256."""

    observation_space = gym.spaces.Box(0, 255, (64, 64), np.uint8)
    action_space = gym.spaces.Discrete(2)
    _number = 0

    def reset(self, **kwargs: Any) -> Any:
        self._number = 0
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        self._number += 1
        return self._seen(), 1.0, False, False, {}

    def _seen(self) -> Any:
        return np.full((64, 64), self._number % 256, np.uint8)

    def pid(self) -> int:
        return os.getpid()


def test_samples_are_whole_while_mapped_memory_is_filled_and_a_worker_dies(tmp_path: Path) -> None:
    """The buffer is small, so that what is sampled is being overwritten."""
    data: Any = pytest.importorskip("torchrl.data", reason="the torchrl extra is not installed")
    size = 64
    buffer = data.ReplayBuffer(
        storage=data.LazyMemmapStorage(size, scratch_dir=tmp_path), batch_size=size
    )
    with dc.MultiaSyncDataCollector(
        [Counted] * 2, frames_per_batch=16, replay_buffer=buffer
    ) as collector:
        [killed], [_] = collector.call("pid").values()
        collector.start()
        eventually(lambda: len(buffer) == size)

        def written_after_checks() -> int:
            sample = buffer.sample()
            seen = sample["observation"].flatten(1)
            following = sample["next", "observation"].flatten(1)
            assert (seen == seen[:, :1]).all()
            assert (following == seen + 1).all()
            return int(buffer.write_count)

        before_kill = written_after_checks()
        os.kill(killed, signal.SIGKILL)
        eventually(lambda: written_after_checks() > before_kill + 100 * size, 60)
        eventually(lambda: collector.stats().workers[0].num_restarts == 1, 60)
