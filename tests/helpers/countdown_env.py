"""An env whose episodes have known lengths and returns."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np


class Countdown(gym.Env[Any, Any]):
    """Episodes of five frames with rewards of 2."""

    observation_space = gym.spaces.Box(0, 9, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._left = 5
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self._left -= 1
        return np.zeros(1, np.float32), 2.0, self._left == 0, False, {}
