"""A small replay buffer, and checks of collectors that fill it in the background."""

from __future__ import annotations

import os
import signal
from typing import Any

import gymnasium as gym
import pytest
import torch
from helpers.policies import ShownWeight
from helpers.waiting import eventually
from tensordict import TensorDict

import distcollect as dc

T = 8


class Buffer:
    """A list of frames: the smallest class that works as a replay buffer."""

    def __init__(self) -> None:
        self.frames: list[TensorDict] = []
        self.inserts: list[int] = []

    def extend(self, data: TensorDict) -> None:
        self.frames.extend(data.unbind(0))
        self.inserts.append(len(data))

    def sample(self, batch_size: int) -> TensorDict:
        indices = torch.randint(len(self.frames), (batch_size,)).tolist()
        return torch.stack([self.frames[index] for index in indices])

    def __len__(self) -> int:
        return len(self.frames)


class KeepingBuffer:
    """A replay buffer that keeps what it is given; with a storage of TorchRL's, if there is one."""

    def __init__(self, **storage: Any) -> None:
        self.added: list[TensorDict] = []
        if storage:
            data = pytest.importorskip("torchrl.data")
            self.storage = data.LazyTensorStorage(1000, **storage)

    def extend(self, data: TensorDict) -> None:
        self.added.append(data)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [tuple(data.shape) for data in self.added]


class Breaks(gym.Wrapper):
    """From its 30th step on, kills its process or raises."""

    def __init__(self, how: str) -> None:
        super().__init__(gym.make("CartPole-v1"))
        self._how, self._left = how, 30

    def step(self, action: Any) -> Any:
        self._left -= 1
        if not self._left and self._how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._left <= 0:
            raise OSError("out of paper")
        return super().step(action)


def check_failure_of_what_collects_is_told(kind: Any, how: str) -> None:
    buffer = dc.RateLimited(Buffer(), 1.0, min_size=10_000)
    faults = dc.Faults(max_restarts=0, max_env_faults=0)
    expected = dc.WorkerLost if how == "dies" else dc.EnvError
    collector = kind(lambda: Breaks(how), frames_per_batch=T, replay_buffer=buffer, faults=faults)
    collector.start()
    with pytest.raises(dc.CollectorStateError, match=r"no more frames come in: .*(worker 0|paper)"):
        buffer.sample(4)
    with pytest.raises(expected):
        collector.update_policy_weights_()
    with pytest.raises(expected):
        collector.async_shutdown()


def check_weights_while_the_buffer_fills(kind: Any) -> None:
    """Frames use published weights only, though the trainer's change all the time."""
    policy, buffer = ShownWeight(), Buffer()
    how = {} if kind is dc.SyncDataCollector else {"num_workers": 2}
    with kind("CartPole-v1", policy, frames_per_batch=T, replay_buffer=buffer, **how) as collector:
        collector.start()
        for version in range(1, 6):
            for _ in range(200):
                with torch.no_grad():
                    policy.weight.add_(0.001)
            with torch.no_grad():
                policy.weight.fill_(version)
            collector.update_policy_weights_()
            if version % 2:
                collector.update_policy_weights_({"weight": torch.tensor(float(version))})
        newest = collector.policy_version
        eventually(lambda: buffer.frames[-1:] and frame_version(buffer) == newest)
        assert collector.call("render_mode")[0] == [None]
    frames = torch.stack(buffer.frames)
    shown, versions = frames["weight"], frames["collector", "policy_version"]
    published = [0, 1, 1, 2, 3, 3, 4, 5, 5]
    assert shown.tolist() == [published[version] for version in versions.tolist()]


def frame_version(buffer: Buffer) -> int:
    return int(buffer.frames[-1]["collector", "policy_version"])
