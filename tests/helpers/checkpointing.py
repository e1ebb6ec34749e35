"""A training that goes on from a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import distcollect as dc


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, observation: torch.Tensor) -> Any:
        rows = len(observation)
        return torch.zeros(rows, dtype=torch.int64), {"seen": self.weight.detach().expand(rows)}


def training(kind: Any, path: Path, **kwargs: Any) -> tuple[Any, ...]:
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=1.0)
    collector = kind("CartPole-v1", policy, frames_per_batch=20, **kwargs)
    parts = {"policy": policy, "optimizer": optimizer, "collector": collector}
    return policy, optimizer, collector, dc.Checkpoint(path, every_s=3600, **parts)


def learn(policy: Policy, optimizer: torch.optim.Optimizer) -> None:
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
    assert [file.name for file in path.parent.iterdir()] == ["checkpoint.pt"]

    resumed, again, collector, checkpoint = training(kind, path, **kwargs)
    with collector:
        assert checkpoint.load()
        assert torch.equal(resumed.weight, policy.weight)
        assert again.state_dict()["state"][0]["step"] == 3
        assert collector.frames == frames == 60
        # Workers have what was loaded, and say so.
        batch = collector.next()
        assert (batch["seen"] == policy.weight.item()).all()
        assert (batch["collector", "policy_version"] == version + 1).all()
