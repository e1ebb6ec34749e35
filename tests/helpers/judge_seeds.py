"""An env and a policy that show numbers of every generator, each under a name of its own."""

from __future__ import annotations

import random
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch import nn

SOURCES = ("own", "numpy", "torch", "random")


def _drawn() -> dict[str, np.ndarray]:
    """A number of each generator that all code of a process shares."""
    return {
        "numpy": np.full(1, np.random.random()),  # noqa: NPY002 - the global one is meant
        "torch": torch.rand(1, dtype=torch.float64).numpy(),
        "random": np.full(1, random.random()),
    }


class RandomEnv(gym.Env[Any, Any]):
    """Observes numbers of its own generator and of those of the process; ends at random.

    ``is_global``: also of those that all envs and the policy share.
    """

    def __init__(self, is_global: bool = True) -> None:
        number = spaces.Box(0, 1, (1,), np.float64)
        names = SOURCES if is_global else SOURCES[:1]
        self.observation_space = spaces.Dict({f"env_{name}": number for name in names})
        self.action_space = spaces.Discrete(5)
        self._is_global = is_global

    def _observed(self) -> dict[str, np.ndarray]:
        drawn = {"own": self.np_random.random(1), **(_drawn() if self._is_global else {})}
        return {f"env_{name}": value for name, value in drawn.items()}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self._observed(), {}

    def step(self, action: Any) -> Any:
        ends = bool(self.np_random.random() < 0.2)
        return self._observed(), float(action), ends, False, {}


class RandomPolicy(nn.Module):
    """Draws its action with torch, and returns a number of each generator."""

    def forward(self, env_own: torch.Tensor) -> Any:
        n = len(env_own)
        action = torch.distributions.Categorical(logits=torch.zeros(n, 5)).sample()
        drawn = {
            "policy_numpy": torch.as_tensor(np.random.random(n)),  # noqa: NPY002
            "policy_torch": torch.randn(n),
            "policy_random": torch.tensor([random.random() for _ in range(n)]),
        }
        return action, drawn


def differing(one: list[TensorDict], other: list[TensorDict]) -> list[str]:
    """The names of the entries of two streams of batches that are not equal in each bit."""
    assert len(one) == len(other)
    return sorted(
        {
            str(key)
            for left, right in zip(one, other, strict=True)
            for key in left.keys(include_nested=True, leaves_only=True)
            if key[0] != "collector" and not torch.equal(left[key], right[key])
        }
    )
