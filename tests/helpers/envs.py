"""Small envs that several test files use."""

from __future__ import annotations

import os
import time
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class SamplingEnv(gym.Env[Any, Any]):
    """Samples its observations; its episodes never end.

    Attributes:
        seen: what a reset returns instead of a sample.
        fails_at: the step, counted from 1, from which on it raises.
    """

    def __init__(
        self,
        observation: gym.Space[Any] | None = None,
        action: gym.Space[Any] | None = None,
        *,
        seen: Any = None,
        fails_at: int | None = None,
    ) -> None:
        self.observation_space = observation or spaces.Box(-1, 1, (3,), np.float32)
        self.action_space = action or spaces.Discrete(2)
        self.seen, self.fails_at, self.steps = seen, fails_at, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        return self.observation_space.sample() if self.seen is None else self.seen, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        self.steps += 1
        if self.fails_at is not None and self.steps >= self.fails_at:
            raise OSError("the simulator crashed")
        return self.observation_space.sample(), 0.0, False, False, {}


class ProcessIdEnv(gym.Env[Any, Any]):
    """Observes the id of its process; an episode has ``length`` steps, each worth ``reward``."""

    observation_space = spaces.Box(0, np.inf, (1,), np.float64)
    action_space = spaces.Discrete(2)

    def __init__(self, length: int | None = None, reward: float = 0.0) -> None:
        self.length, self.reward, self.steps = length, reward, 0

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return np.full(1, os.getpid(), np.float64), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        seen = np.full(1, os.getpid(), np.float64)
        return seen, self.reward, self.steps == self.length, False, {}


class CountdownEnv(gym.Env[Any, Any]):
    """Episodes of five frames with rewards of 2."""

    observation_space = spaces.Box(0, 9, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._left = 5
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self._left -= 1
        return np.zeros(1, np.float32), 2.0, self._left == 0, False, {}


class StepCountEnv(gym.Env[np.ndarray, np.int64]):
    """Observes how many steps its episode has had; each step takes ``pause_s``."""

    observation_space = spaces.Box(0, np.inf, (1,), np.float64)
    action_space = spaces.Discrete(2)

    def __init__(self, pause_s: float = 0.0) -> None:
        self.pause_s = pause_s

    def reset(self, **_: Any) -> tuple[np.ndarray, dict[str, Any]]:
        self.steps = 0
        return np.zeros(1), {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        time.sleep(self.pause_s)
        return np.full(1, self.steps, np.float64), 1.0, False, False, {}


class StumblingEnv(gym.Wrapper[Any, Any, Any, Any]):
    """Raises once it has made ``at`` steps."""

    def __init__(self, env: Any, at: int | None) -> None:
        super().__init__(env)
        self.left = at

    def step(self, action: Any) -> Any:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise RuntimeError("stumbled")
        return super().step(action)


class Counting(gym.Env[np.ndarray, Any]):
    """Observes how often it was stepped; so no two of its frames are the same."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def __init__(self) -> None:
        self.stepped = 0
        self.length = 0

    def reset(self, **kwargs: Any) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(**kwargs)
        self.length = 0
        return np.array([float(self.stepped)]), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.stepped += 1
        self.length += 1
        return np.array([float(self.stepped)]), 1.0, self.length == 7, False, {}

    def told(self) -> int:
        return self.stepped


class PidCartPole(gym.Wrapper[Any, Any, Any, Any]):
    """CartPole that tells its process."""

    def __init__(self) -> None:
        super().__init__(gym.make("CartPole-v1"))

    def pid(self) -> int:
        return os.getpid()


def env_of_context(context: Any) -> SamplingEnv:
    assert context.env_index == 0
    return SamplingEnv()
