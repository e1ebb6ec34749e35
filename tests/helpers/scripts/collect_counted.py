"""Collects until a line comes by standard input; checks that no frame is missing or comes twice."""

import json
import os
import sys
import threading

import gymnasium as gym
import numpy as np

import distcollect as dc

FRAMES = 50
WIDE = 2000  # so that a rollout does not come along with its header
MORE = 6


class Counting(gym.Env):
    """Observes its process, and how many steps it has made."""

    observation_space = gym.spaces.Box(0, 1e9, (2 + WIDE,), np.float64)
    action_space = gym.spaces.Discrete(2)
    count = 0

    def _observe(self):
        return np.array([os.getpid(), self.count] + [self.count] * WIDE, np.float64)

    def reset(self, *, seed=None, options=None):
        return self._observe(), {}

    def step(self, action):
        threading.Event().wait(0.001)
        self.count += 1
        return self._observe(), 1.0, False, False, {}


def main():
    wanted = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.readline(), wanted.set()), daemon=True).start()
    expected = {}  # by worker and process
    replaced = 0
    with dc.RPCDataCollector(Counting, frames_per_batch=FRAMES) as collector:
        rest, begun = MORE, False
        while rest:
            batch = collector.next(timeout_s=60)
            worker = int(batch["collector", "worker_id"][0, 0])
            seen = batch["observation"][0]
            process = (worker, int(seen[0, 0]))
            first = expected.get(process, 0)
            numbers = list(range(first, first + FRAMES))
            assert seen[:, 1].tolist() == numbers, (process, first, seen[:, 1])
            assert (seen[:, 2:] == seen[:, 1:2]).all()
            expected[process] = first + FRAMES
            replaced = len(expected) - len({worker for worker, _ in expected})
            if not begun and len(expected) == 2:
                begun = True
                print("running", flush=True)
            rest -= wanted.is_set()
    total = collector.ledger.total
    seen = {"delivered": total.delivered, "lost": total.lost, "open": total.open}
    seen["at_most"] = total.at_most
    seen |= {"came": sum(expected.values()), "replaced": replaced}
    print(json.dumps(seen), flush=True)


if __name__ == "__main__":
    dc.run(main)
