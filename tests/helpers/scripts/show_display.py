"""Collects on a terminal for four seconds, printing meanwhile; then does what its argument says."""

from __future__ import annotations

import sys
import time
from typing import Any

import gymnasium as gym
import numpy as np

import distcollect as dc


class Slow(gym.Env[Any, Any]):
    observation_space = gym.spaces.Box(0, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        time.sleep(0.01)
        return np.zeros(1, np.float32), 1.0, False, False, {}


collector = dc.SyncDataCollector(Slow, frames_per_batch=10)
end = time.monotonic() + 4
for number, _ in enumerate(collector):
    if number % 5 == 0:
        print(f"batch {number} is here")
    if time.monotonic() > end:
        break
if sys.argv[1] == "raises":
    raise RuntimeError("of the user's own")
if sys.argv[1] == "interrupted":
    raise KeyboardInterrupt
collector.shutdown()
