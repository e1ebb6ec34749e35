"""Asynchronous collection that gives the same batches each time."""

from __future__ import annotations

import random
import time
from typing import Any

import gymnasium as gym
import pytest
import torch
from torch import nn

import distcollect as dc

T, N = 6, 2


class Uneven(gym.Wrapper):
    """CartPole whose steps take a random time."""

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


def run(*, wait: bool) -> torch.Tensor:
    with dc.RPCDataCollector(
        Uneven,
        Learned(),
        frames_per_batch=N * T,
        envs_per_worker=N,
        num_workers=3,
        reproducible=True,
    ) as collector:
        collector.set_seed(3)
        batches = []
        for version in range(1, 16):
            batches.append(collector.next().clone())
            time.sleep(random.random() * 0.01)
            collector.update_policy_weights_(Learned(version), wait=wait)
        return torch.stack(batches)


@pytest.mark.parametrize("wait", [True, False])
def test_same_batches(wait: bool) -> None:
    first, second = run(wait=wait), run(wait=wait)
    told = first["collector"]
    assert told["worker_id"][:, 0, 0].tolist() == [0, 1, 2] * 5
    # All workers begin with version 0; then each lags by the batches of the other two.
    versions = [0, 0, 0, *range(1, 13)]
    assert told["policy_version"][:, 0, 0].tolist() == versions
    assert (told["policy_version"] == told["policy_version"][..., :1, :1]).all()
    assert torch.equal(first["version"].long(), told["policy_version"])
    # Trajectory ids contain the process's id, which differs in each run.
    without_ids = [each.exclude(("collector", "traj_ids")) for each in (first, second)]
    assert (without_ids[0] == without_ids[1]).all()
    assert len(first["action"].unique()) == 2
