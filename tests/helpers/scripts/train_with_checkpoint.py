"""Trains with a Checkpoint, and prints what it does.

train_with_checkpoint.py FILE step|wait
"""

import sys
import time

import gymnasium as gym
import numpy as np
import torch

import distcollect as dc


class Slow(gym.Env):
    observation_space = gym.spaces.Box(0, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.pause_s = 0.0
        return np.zeros(1, np.float32), {}

    def dawdle(self):
        self.pause_s = 30.0

    def step(self, action):
        time.sleep(self.pause_s)
        return np.zeros(1, np.float32), 1.0, False, False, {}


def main():
    path, mode = sys.argv[1:]
    policy = torch.nn.Linear(1, 2)
    with dc.RPCDataCollector(
        Slow, frames_per_batch=10, num_workers=1, faults=dc.Faults(stop_timeout_s=1.0)
    ) as collector:
        checkpoint = dc.Checkpoint(
            path, policy=policy, collector=collector, every_s=3600, save_on_ctrl_c=True
        )
        print("resumed" if checkpoint.load() else "new", collector.frames, flush=True)
        while True:
            collector.next()
            checkpoint.step()
            if collector.frames == 50 and mode == "wait":
                collector.call("dawdle")
            if collector.frames == 50:
                print("running", flush=True)


if __name__ == "__main__":
    dc.run(main)
