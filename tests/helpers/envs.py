"""Small envs that several test files use."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class SamplingEnv(gym.Env[Any, Any]):
    """Samples its observations from the space given; never ends an episode."""

    def __init__(self, observation: gym.Space | None = None, action: gym.Space | None = None):
        self.observation_space = observation or spaces.Box(-1, 1, (3,), np.float32)
        self.action_space = action or spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        return self.observation_space.sample(), 0.0, False, False, {}
