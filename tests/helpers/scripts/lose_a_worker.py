"""Collects under whatever launched it while a worker is lost and comes back; see test_launch.py.

lose_a_worker.py kill      the trainer kills worker 1 itself
lose_a_worker.py unplug    the host of worker 1 is unplugged when "running" is printed, and
                           plugged in again when "lost" is
"""

import os
import signal
import sys
import time

import gymnasium as gym
import numpy as np

import distcollect as dc


class Telling(gym.Env):
    """Observes its process."""

    observation_space = gym.spaces.Box(0, np.inf, (1,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.full(1, os.getpid(), np.float64), {}

    def step(self, action):
        time.sleep(0.001)
        return np.full(1, os.getpid(), np.float64), 1.0, False, False, {}


def main():
    with dc.RPCDataCollector(Telling, frames_per_batch=20) as collector:
        pids = {}

        def until(holds):
            while not holds():
                batch = collector.next(timeout_s=60)
                pids[int(batch["collector", "worker_id"][0, 0])] = int(
                    batch["observation"][0, 0, 0]
                )

        until(lambda: len(pids) == 2)
        print("running", flush=True)
        if sys.argv[1] == "kill":
            os.kill(pids[1], signal.SIGKILL)
        until(lambda: collector.num_workers == 1)
        print("lost", flush=True)
        pids.pop(1, None)
        until(lambda: collector.num_workers == 2)
        until(lambda: 1 in pids)
    report = collector.ledger
    print(report)
    assert report.total.open == 0
    print("mended", flush=True)


if __name__ == "__main__":
    dc.run(main)
