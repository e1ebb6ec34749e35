"""Asynchronous collection that gives the same batches each time."""

from __future__ import annotations

import random
import time
from typing import Any

import gymnasium as gym
import torch
from torch import nn

T, N = 6, 2


class Uneven(gym.Wrapper):
    """CartPole that takes its time, another each time."""

    def __init__(self, pause_s: float = 0.001) -> None:
        super().__init__(gym.make("CartPole-v1"))
        self._pause_s = pause_s

    def step(self, action: Any) -> Any:
        time.sleep(random.random() * self._pause_s)
        return self.env.step(action)


class Learned(nn.Module):
    def __init__(self, version: int = 0) -> None:
        super().__init__()
        self.version = nn.Parameter(torch.tensor(float(version)))

    def forward(self, observation: torch.Tensor) -> Any:
        n = len(observation)
        noise = torch.rand(n) + 0.05 * self.version
        return (noise > 0.5).long(), {"version": self.version.expand(n)}


def run(make: Any, *, wait: bool, num_workers: int = 3, num_batches: int = 15) -> torch.Tensor:
    with make(
        Uneven,
        Learned(),
        frames_per_batch=N * T,
        envs_per_worker=N,
        num_workers=num_workers,
        reproducible=True,
    ) as collector:
        collector.set_seed(3)
        batches = []
        for version in range(1, num_batches + 1):
            batches.append(collector.next().clone())
            time.sleep(random.random() * 0.01)
            collector.update_policy_weights_(Learned(version), wait=wait)
        return torch.stack(batches)


def check_same_batches(make: Any, wait: bool) -> None:
    first, second = run(make, wait=wait), run(make, wait=wait)
    told = first["collector"]
    assert told["worker_id"][:, 0, 0].tolist() == [0, 1, 2] * 5
    # The first round begins with version 0; after that each worker lags by the other two.
    versions = [0, 0, 0, *range(1, 13)]
    assert told["policy_version"][:, 0, 0].tolist() == versions
    assert (told["policy_version"] == told["policy_version"][..., :1, :1]).all()
    assert torch.equal(first["version"].long(), told["policy_version"])
    # Processes have other ids each time, and so have trajectories.
    without_ids = [each.exclude(("collector", "traj_ids")) for each in (first, second)]
    assert (without_ids[0] == without_ids[1]).all()
    assert len(first["action"].unique()) == 2
