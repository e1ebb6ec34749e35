"""An env whose level can be set by a call, and a policy for it."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

import distcollect as dc

T = 10


class Levels(gym.Env):
    """Shows its level; an episode is as long as the level, and every frame is worth it."""

    observation_space = gym.spaces.Box(-1, 1e6, (1,), np.float32)
    action_space = gym.spaces.Discrete(3)

    def __init__(self, context: dc.EnvContext) -> None:
        self.name = f"{context.worker_id}.{context.env_index}"
        self._level, self._frame = 5, 0

    def _seen(self) -> np.ndarray:
        return np.array([self._level], np.float32)

    def set_level(self, level: int, *, plus: int = 0) -> str:
        if level < 0:
            raise ValueError(f"no level {level}")
        self._level = level + plus
        return f"{self.name} at {self._level}"

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._frame = 0
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        self._frame += 1
        return self._seen(), float(action), self._frame >= self._level, False, {}


class Acts(nn.Module):
    """The action is its weight, mostly."""

    def __init__(self, action: int) -> None:
        super().__init__()
        self.action = nn.Parameter(torch.tensor(float(action)))

    def forward(self, observation: torch.Tensor) -> Categorical:
        probs = 0.9 * nn.functional.one_hot(self.action.long(), 3) + 0.1 / 3
        return Categorical(probs.expand(len(observation), -1))


class Chance(nn.Module):
    def forward(self, observation: torch.Tensor) -> Categorical:
        return Categorical(torch.full((len(observation), 2), 0.5))


def check_random_numbers(kind: Any) -> None:
    """With a seed the same episodes; collection goes on as if nothing had happened."""

    def collect(*, evaluates: bool) -> Any:
        how = {} if kind is dc.SyncDataCollector else {"num_workers": 2}
        with kind(
            "CartPole-v1", Chance(), frames_per_batch=4 * T, envs_per_worker=2, **how
        ) as collector:
            collector.set_seed(5)
            batches = []
            for _ in range(4):
                batches.append(collector.next())
                if evaluates:
                    found = collector.evaluate(8, deterministic=False, seed=3).returns
                    assert len(found.unique()) > 1
                    same = collector.evaluate(8, deterministic=False, seed=3).returns
                    assert torch.equal(found.sort()[0], same.sort()[0])
            return torch.stack(batches).exclude("collector")

    assert (collect(evaluates=True) == collect(evaluates=False)).all()
