"""A whole program that ends in some way; see test_endings.py.

    end_in_some_way.py ENV END

ENV: "fine"; "hang" and "gil": at some step the env blocks, without or with the interpreter lock;
"vector": an AsyncVectorEnv in each worker.
END: how the loop ends by itself: "normal", "break", "raise", "forever"; "push": weights are pushed
while the env blocks.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from torch import nn

import distcollect as dc
from distcollect.launch.topology import Launch

KIND, END = sys.argv[1:]


class Env(gym.Env):
    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)
    steps = 0

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        if self.steps == 24 and KIND in {"hang", "gil"}:
            os.write(1, b"stuck\n")  # in one write, since the trainer prints too
            if KIND == "hang":
                time.sleep(1000)
            ctypes.PyDLL(None).sleep(1000)
        return np.zeros(2, np.float32), 1.0, self.steps % 7 == 0, False, {}


def make_env():
    return gym.vector.AsyncVectorEnv([Env, Env]) if KIND == "vector" else Env()


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1000))

    def forward(self, observation):
        return torch.zeros(len(observation), dtype=torch.int64)


def main():
    policy = Policy()
    collector = dc.RPCDataCollector(
        make_env,
        policy,
        frames_per_batch=16,
        total_frames=64 if END == "normal" else -1,
        num_workers=None if Launch.detect().num_workers else 1,
    )
    print("running", flush=True)
    for i, _ in enumerate(collector):
        if END == "break" and i == 3:
            break
        if END == "raise" and i == 3:
            raise RuntimeError("the user's loop is broken")
        while END == "push":
            collector.update_policy_weights_(policy)
        os.write(1, b"batch\n")
    print("left the loop", flush=True)
    return collector  # no shutdown: the test covers that too


if __name__ == "__main__":
    dc.run(main)
