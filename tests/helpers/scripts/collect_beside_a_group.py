"""Collects in a process that has a process group of its own; prints what is open beside it."""

import json
import os
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
from helpers.descendants import links_of
from helpers.judge_launches import listening_ports
from torch import nn

import distcollect as dc


class Telling(gym.Env):
    """Observes its process."""

    observation_space = gym.spaces.Box(0, 1e9, (1,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.array([os.getpid()], np.float64), {}

    def step(self, action):
        return np.array([os.getpid()], np.float64), 1.0, False, False, {}


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1 << 20))

    def forward(self, observation):
        rows = len(observation)
        return torch.zeros(rows, dtype=torch.int64), {"weight": self.weight[-1].expand(rows)}


def num_connections(pid):
    """TCP connections that a process has."""
    inodes = set(links_of(pid))
    lines = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    return sum(
        f"socket:[{words[9]}]" in inodes and words[3] == "01" for words in map(str.split, lines)
    )


def main():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    me, policy = os.getpid(), Policy()
    ports = listening_ports(me)
    with dc.Collector(
        Telling, policy, backend="distributed", num_collectors=2, frames_per_batch=32, sync=True
    ) as collector:
        collector.next()
        with torch.no_grad():
            policy.weight += 1
        collector.update_policy_weights_(wait=True)
        batch = collector.next()
        assert (batch["weight"] == 1).all()
        workers = batch["observation"].unique().int().tolist()
        seen = {
            "ports": sorted(set(listening_ports(me)) - set(ports)),
            "ports of workers": [listening_ports(pid) for pid in workers],
            "connections of workers": [num_connections(pid) for pid in workers],
        }
    assert dist.is_initialized()
    dist.destroy_process_group()
    print(json.dumps(seen))


if __name__ == "__main__":
    dc.run(main)
