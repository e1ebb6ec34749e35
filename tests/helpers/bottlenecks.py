"""An env that waits or computes, a policy of any size, and what bounds the run."""

from __future__ import annotations

import time
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import nn


class Env(gym.Env[Any, Any]):
    """Does nothing, or computes, or waits."""

    action_space = gym.spaces.Discrete(2)

    def __init__(
        self, shape: tuple[int, ...] = (4,), spin_s: float = 0.0, sleep_s: float = 0.0
    ) -> None:
        self.observation_space = gym.spaces.Box(0, 255, shape, np.uint8)
        self._obs = np.zeros(shape, np.uint8)
        self._spin_s, self._sleep_s = spin_s, sleep_s

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self._obs, {}

    def step(self, action: Any) -> Any:
        end = time.perf_counter() + self._spin_s
        while time.perf_counter() < end:
            pass
        if self._sleep_s:
            time.sleep(self._sleep_s)
        return self._obs, 1.0, False, False, {}


class Policy(nn.Module):
    def __init__(self, size: int = 1, weights: int = 8) -> None:
        super().__init__()
        self.body = nn.Linear(size, size)
        self.more = nn.Parameter(torch.zeros(weights))
        self.input = torch.zeros(1, size)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        self.body(self.input)
        return torch.zeros(len(observation), dtype=torch.int64)


def collect(collector: Any, *, num_batches: int, train_s: float = 0.0, push: Any = None) -> str:
    with collector:
        for _, _ in zip(range(num_batches), collector, strict=False):
            time.sleep(train_s)
            if push is not None:
                collector.update_policy_weights_(push)
    return collector.verdict().bound
