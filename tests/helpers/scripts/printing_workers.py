"""Collects with two workers for as many seconds as its argument says.

Worker 0 prints by Python and by C, on stdout and stderr. Worker 1 is killed after it has printed.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import sys
import time
from typing import Any

import gymnasium as gym
import numpy as np

import distcollect as dc


class Printing(gym.Env[Any, Any]):
    observation_space = gym.spaces.Box(0, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, context: dc.EnvContext) -> None:
        self.dies = (context.worker_id, context.incarnation) == (1, 0)
        self.number = itertools.count()
        self.libc = ctypes.CDLL(None)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        number = next(self.number)
        if self.dies:
            if number == 300:
                print("unfinished last words", end="", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
        elif number % 3 == 0:
            print(f"out {number}", "x" * (300 if number == 3 else 1))
        elif number % 3 == 1:
            sys.stderr.write(f"err {number}\n")
        else:
            self.libc.puts(f"\33[32mC {number}\33[0m".encode())
        time.sleep(0.01)
        return np.zeros(1, np.float32), 1.0, False, False, {}


if __name__ == "__main__":
    limits = dc.Faults(max_restarts=0, min_workers=1)
    with dc.MultiaSyncDataCollector(
        Printing, frames_per_batch=10, num_workers=2, faults=limits
    ) as collector:
        for number, _ in enumerate(collector):
            if number % 5 == 0:
                print(f"batch {number} is here")
            stats = collector.stats()
            if stats.elapsed_s > float(sys.argv[1]) and stats.workers[1].state == "lost":
                break
