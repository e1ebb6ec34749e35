"""What bounds runs that were built for each bottleneck."""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
import torch
from helpers.loopback_pool import loopback_collector
from torch import nn

import distcollect as dc

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers can't import test modules


class Env(gym.Env[Any, Any]):
    """Each step computes for ``spin_s`` and sleeps for ``sleep_s``."""

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
    return collector.bottleneck().bound


def test_bound_by_the_policy() -> None:
    collector = dc.SyncDataCollector(Env, Policy(size=2000), frames_per_batch=30)
    assert collect(collector, num_batches=4) == "policy"


def test_bound_by_the_envs_of_a_worker() -> None:
    # They sleep: a busy env would hold the interpreter lock, which the trainer needs too.
    env = partial(Env, sleep_s=0.003)
    collector = loopback_collector(env, Policy(), frames_per_batch=30, num_workers=1)
    assert collect(collector, num_batches=6) == "env"


def test_bound_by_the_trainer() -> None:
    collector = loopback_collector(Env, Policy(), frames_per_batch=20, num_workers=1)
    assert collect(collector, num_batches=5, train_s=0.2) == "trainer"


def test_bound_by_moving_and_by_weights_between_processes() -> None:
    big = dc.MultiaSyncDataCollector(
        lambda: Env(shape=(512, 512, 4)), Policy(), frames_per_batch=32, num_workers=1
    )
    assert collect(big, num_batches=30) == "network"
    policy = Policy(weights=8_000_000)
    pushing = dc.aSyncDataCollector(Env, policy, frames_per_batch=20)
    assert collect(pushing, num_batches=15, push=policy) == "weights"
