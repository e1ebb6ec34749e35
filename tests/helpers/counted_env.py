"""An env whose frames can be told apart: each entry of each observation follows from its count."""

from __future__ import annotations

import time
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

STEPS = 40  # of an episode


def observed(episode: int, step: int) -> dict[str, Any]:
    """What is observed after ``step`` steps."""
    return {
        "episode": np.array([episode], np.int64),
        "step": step,
        "arm/hand": (np.full(3, step / 2, np.float32), np.array([step % 2, 1], np.int8)),
        "image": np.full((2, 2), (episode + step) % 256, np.uint8),
    }


class Counted(gym.Env[Any, Any]):
    """Episodes with a random number of their own."""

    observation_space = spaces.Dict(
        {
            "episode": spaces.Box(0, 1 << 62, (1,), np.int64),
            "step": spaces.Discrete(STEPS + 1),
            "arm/hand": spaces.Tuple(
                (spaces.Box(0, STEPS, (3,), np.float32), spaces.MultiBinary(2))
            ),
            "image": spaces.Box(0, 255, (2, 2), np.uint8),
        }
    )
    action_space = spaces.Dict({"turn": spaces.MultiDiscrete([2, 3]), "go": spaces.Discrete(2)})

    def __init__(self, step_s: float = 0.0) -> None:
        self._step_s = step_s

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._episode, self._step = int(self.np_random.integers(1 << 60)), 0
        return observed(self._episode, 0), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(self._step_s)
        self._step += 1
        over = self._step == STEPS
        return observed(self._episode, self._step), float(self._step), over, False, {}


gym.register("Counted-v0", Counted)
gym.register("SlowlyCounted-v0", Counted, kwargs={"step_s": 0.001})
