"""A policy that writes its weights into each frame, and collectors for it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers.loopback_pool import loopback_collector
from tensordict import TensorDict
from torch import nn

import distcollect as dc

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers can't import test modules


class Env(gym.Env[Any, Any]):
    """Observes its process's id."""

    observation_space = spaces.Box(0, 1e9, (1,), np.float64)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.full(1, os.getpid(), np.float64), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.full(1, os.getpid(), np.float64), 0.0, False, False, {}


class Telling(nn.Module):
    """Writes the value of each of its weights into each frame."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.zeros(300, dtype=torch.float64))
        self.body = nn.Linear(4, 4)
        self.critic = nn.Linear(4, 1)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.fill(value)

    def fill(self, value: float) -> Telling:
        with torch.no_grad():
            for tensor in self.state_dict().values():
                tensor.fill_(value)
        return self

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        n = len(observation)
        told = {name: t.double().mean().expand(n) for name, t in self.state_dict().items()}
        told = {name.replace(".", "_"): value for name, value in told.items()}
        return torch.zeros(n, dtype=torch.int64), told


NAMES = [name.replace(".", "_") for name in Telling().state_dict()]


def told(batch: TensorDict, row: int = 0) -> dict[str, float]:
    """The weights' values in the last frame of a row."""
    return {name: float(batch[name][row, -1]) for name in NAMES}


Collect = Callable[..., dc.RPCDataCollector]


@pytest.fixture
def collect() -> Iterator[Collect]:
    """Makes collectors whose workers are threads of this process."""
    opened: list[dc.RPCDataCollector] = []

    def make(policy: Any = None, *, num_workers: int = 2, **kwargs: Any) -> dc.RPCDataCollector:
        kwargs = {"sync": True, "frames_per_batch": 4 * num_workers, **kwargs}
        if not kwargs["sync"]:
            kwargs["frames_per_batch"] = 4
        policy = Telling() if policy is None else policy
        collector = loopback_collector(Env, policy, num_workers=num_workers, **kwargs)
        opened.append(collector)
        return collector

    yield make
    for collector in opened:
        collector.shutdown()
