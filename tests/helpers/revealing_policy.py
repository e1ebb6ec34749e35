"""A policy that writes its weights into each frame."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import cloudpickle
import torch
from tensordict import TensorDict
from torch import nn

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers can't import test modules


class Revealing(nn.Module):
    """Writes into each frame the lowest and highest value of each of its weights."""

    def __init__(self, size: int = 64, value: float = 0) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(()))
        self.large = nn.Parameter(torch.zeros(size))
        self.register_buffer("mean", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("own", torch.full((2,), -5.0), persistent=False)
        self.inner = nn.Linear(2, 2, bias=False)
        self.tied = nn.Linear(2, 2, bias=False)
        self.tied.weight = self.inner.weight
        self.last = nn.Parameter(torch.zeros(1))
        self.fill(value)

    def fill(self, value: float) -> Revealing:
        with torch.no_grad():
            for tensor in self.state_dict().values():
                tensor.fill_(value)
        return self

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        n = len(observation)
        extremes = [f(t).double() for t in self.weights() for f in (torch.min, torch.max)]
        revealed = torch.stack(extremes).expand(n, -1)
        same = torch.full((n,), self.tied.weight is self.inner.weight)
        return torch.zeros(n, dtype=torch.int64), {"weights": revealed, "tied": same}

    def weights(self) -> list[torch.Tensor]:
        tied = [self.inner.weight, self.tied.weight]
        return [self.first, self.large, self.mean, self.count, *tied, self.last]


def check_whole(batch: TensorDict, values: Mapping[int, float] | None = None) -> list[int]:
    """The versions in ``batch``, whose weights must all be those of the version."""
    versions = batch["collector", "policy_version"]
    expected = versions.double()
    for version, value in (values or {}).items():
        expected[versions == version] = value
    shown = batch["weights"]
    assert (shown == expected.unsqueeze(-1)).all(), (versions.unique(), shown.unique())
    assert batch["tied"].all()
    return sorted(versions.unique().tolist())
