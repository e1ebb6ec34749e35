"""A small training run for the tests on a cluster; prints a line of JSON per batch.

The policy's only weight counts the batches that were trained on, so that what is lost or done twice
shows.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch

import distcollect as dc


class Paced(gym.Env):
    """Steps take a millisecond."""

    observation_space = gym.spaces.Box(0, np.inf, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.steps += 1
        time.sleep(0.001)
        return np.full(1, self.steps, np.float32), 1.0, False, self.steps == 20, {}


class Policy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.batches = torch.nn.Parameter(torch.zeros(()))

    def forward(self, observation):
        rows = len(observation)
        return torch.randint(2, (rows,)), {"seen": self.batches.detach().expand(rows)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batches", type=int, default=30)
    parser.add_argument("--until", type=Path, help="go on until this file is there")
    parser.add_argument("--fail-at", type=int)
    args = parser.parse_args()

    policy = Policy()
    optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
    with dc.RPCDataCollector(Paced, policy, frames_per_batch=240, sync=True) as collector:
        checkpoint = dc.Checkpoint(
            policy=policy, optimizer=optimizer, collector=collector, every_s=1.0
        )
        resumed = checkpoint.load()
        say(event="start", resumed=resumed, batches=round(policy.batches.item()))
        while policy.batches.item() < args.batches or not (
            args.until is None or args.until.exists()
        ):
            batch = collector.next()
            if policy.batches.item() == args.fail_at:
                raise RuntimeError("as it was told to")
            optimizer.zero_grad()
            (-policy.batches).backward()
            optimizer.step()
            checkpoint.step()
            collector.update_policy_weights_(policy)
            say(
                event="batch",
                number=round(policy.batches.item()),
                frames=collector.frames,
                version=collector.policy_version,
                seen=batch["seen"].unique().tolist(),
                workers=batch["collector", "worker_id"].unique().tolist(),
                present=collector.num_workers,
            )
        say(event="done", batches=round(policy.batches.item()))


def say(**about):
    print(json.dumps(about), flush=True)


if __name__ == "__main__":
    dc.run(main)
