"""Collects twice under any launcher, and prints what the trainer saw as JSON."""

import json
import os
import subprocess

import gymnasium as gym
import numpy as np
import torch

import distcollect as dc

SHAPE = (128, 256)  # large enough that rollouts don't come along with their headers


class Counting(gym.Env):
    """Every byte of an observation says how many steps were made."""

    observation_space = gym.spaces.Box(0, 255, SHAPE, np.uint8)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return np.zeros(SHAPE, np.uint8), {}

    def step(self, action):
        self.steps += 1
        return np.full(SHAPE, self.steps, np.uint8), 1.0, False, self.steps == 100, {}


class Policy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.version = torch.nn.Parameter(torch.zeros(()))

    def forward(self, observation):
        rows = len(observation)
        return torch.randint(2, (rows,)), {"seen": self.version.expand(rows)}


def listening():
    """The addresses that this process listens on."""
    found = subprocess.run(["ss", "-Hltnp"], check=True, capture_output=True, text=True)
    mine = [line for line in found.stdout.splitlines() if f"pid={os.getpid()}," in line]
    return sorted({line.split()[3].rsplit(":", 1)[0] for line in mine})


def check(batch, version):
    assert (batch["seen"] == version).all()
    before, after = batch["observation"], batch["next", "observation"]
    assert (after == before + 1).all()
    assert (before == before[..., :1, :1]).all()


def main():
    policy = Policy()
    seen = []
    for number in range(2):
        trace = os.environ.get("DISTCOLLECT_TEST_TRACE")
        with dc.RPCDataCollector(
            Counting,
            policy,
            frames_per_batch=240,
            total_frames=720,
            envs_per_worker=2,
            sync=True,
            trace=f"{trace}.{number}" if trace else None,
        ) as collector:
            for batch in collector:
                check(batch, policy.version.item())
                with torch.no_grad():
                    policy.version += 1
                collector.update_policy_weights_()
            worker_ids = batch["collector", "worker_id"].unique().tolist()
            workers = collector._backend.workers
            peers = [process.peer for process in workers._lifecycle.processes.values()]
            shared = sum(map(workers.transport.shares_memory, peers))
            seen.append(
                {
                    "shape": list(batch.shape),
                    "workers": worker_ids,
                    "listening": listening(),
                    "workers whose memory is mapped": shared,
                }
            )
    print(json.dumps(seen))


if __name__ == "__main__":
    dc.run(main)
