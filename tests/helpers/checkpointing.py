"""A training run that is saved and resumed by a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from helpers.policies import ShownWeight
from torch import nn

import distcollect as dc


def training(kind: Any, path: Path, **kwargs: Any) -> tuple[Any, ...]:
    policy = ShownWeight()
    optimizer = torch.optim.Adam(policy.parameters(), lr=1.0)
    collector = kind("CartPole-v1", policy, frames_per_batch=20, **kwargs)
    parts = {"policy": policy, "optimizer": optimizer, "collector": collector}
    return policy, optimizer, collector, dc.Checkpoint(path, every_s=3600, **parts)


def learn(policy: ShownWeight, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    (-policy.weight).backward()
    optimizer.step()


def check_goes_on_where_it_was(tmp_path: Path, kind: Any) -> None:
    path = tmp_path / "deep" / "checkpoint.pt"
    kwargs = {} if kind is dc.SyncDataCollector else {"num_workers": 1}
    policy, optimizer, collector, checkpoint = training(kind, path, **kwargs)
    with collector:
        assert not checkpoint.load()
        for _ in range(3):
            collector.next()
            learn(policy, optimizer)
            assert not checkpoint.step()
            collector.update_policy_weights_(policy)
        checkpoint.save()
        version, frames = collector.policy_version, collector.frames
    assert {*path.parent.iterdir()} - {path.with_name(".checkpoint.pt.lock")} == {path}

    resumed, again, collector, checkpoint = training(kind, path, **kwargs)
    with collector:
        assert checkpoint.load()
        assert torch.equal(resumed.weight, policy.weight)
        assert again.state_dict()["state"][0]["step"] == 3
        assert collector.frames == frames == 60
        # Workers act with the weights that were loaded.
        batch = collector.next()
        assert (batch["weight"] == policy.weight.item()).all()
        assert (batch["collector", "policy_version"] == version + 1).all()


class Echo(gym.Env[Any, Any]):
    """One step long; its return is the action."""

    observation_space = gym.spaces.Box(0.0, 1.0, (1,))
    action_space = gym.spaces.Box(-10.0, 10.0, (1,))

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(1, np.float32), float(action[0]), True, False, {}


class Constant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.zeros(1))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.value.expand(len(observation), 1)
