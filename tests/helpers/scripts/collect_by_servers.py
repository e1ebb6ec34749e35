"""Collects by inference servers under any launcher; a test injures them meanwhile.

It prints who was served by whom as JSON, once more after each line that it reads, when some are
served by other processes, and at the end what became of the frames.
"""

import json
import os
import socket
import sys
import time

import gymnasium as gym
import numpy as np
import torch

import distcollect as dc

WAIT_S = 60


def here():
    """Number of this host and of this process's rank, and its id."""
    host = int("".join(filter(str.isdigit, socket.gethostname())) or 0)
    return host, int(os.environ["PID_OF_RANK"]), os.getpid()


class Placed(gym.Env):
    observation_space = gym.spaces.Box(0, 2**31, (3,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.array(here(), np.float64), {}

    def step(self, action):
        return np.array(here(), np.float64), 0.0, False, False, {}


class Telling(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, observation):
        n = len(observation)
        told = {"server": torch.tensor(here()).expand(n, 3), "weight": self.weight.expand(n)}
        return torch.zeros(n, dtype=torch.int64), told


def served(batch):
    """worker_id to where it is, and where its server is, by the last frames of a batch."""
    last = batch[:, -1]
    ids = last["collector", "worker_id"].tolist()
    places = zip(last["observation"].int().tolist(), last["server"].tolist(), strict=True)
    return dict(zip(map(str, ids), places, strict=True))


def main():
    ranks = [int(rank) for rank in os.environ.get("SERVER_RANKS", "").split()]
    policy = Telling()
    with dc.RPCDataCollector(
        Placed,
        policy,
        envs_per_worker=2,
        frames_per_batch=dc.num_workers(0) * 2 * 20,
        sync=True,
        inference=dc.Inference("rank", ranks=ranks) if ranks else dc.Inference("host"),
        faults=dc.Faults(restart_pause_s=0.1),
    ) as collector:
        collector.next()
        with torch.no_grad():
            policy.weight.fill_(1.0)
        collector.update_policy_weights_(policy)

        def collect():
            batch = collector.next(timeout_s=WAIT_S)
            assert batch["collector", "policy_version"].unique().tolist() == [1]
            assert batch["weight"].unique().tolist() == [1.0]
            return served(batch)

        found = collect()
        print(json.dumps({"served": found}), flush=True)
        while sys.stdin.readline().strip():
            deadline, before = time.monotonic() + WAIT_S, found
            while found.keys() == before.keys() and all(
                server in [each for _, each in before.values()] for _, server in found.values()
            ):
                assert time.monotonic() < deadline, found
                found = collect()
            print(json.dumps({"served": found}), flush=True)
    total = collector.ledger.total
    assert total.stepped == total.delivered + sum(total.lost.values())
    print(json.dumps({"lost": total.lost, "workers": [*collector.ledger.workers]}), flush=True)


if __name__ == "__main__":
    os.environ["PID_OF_RANK"] = str(os.getpid())  # workers and servers inherit it
    dc.run(main)
