"""Small policies that several test files use."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributions import Categorical


class ConstantPolicy(nn.Module):
    """Chooses action 0; has one weight, which changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(observation), dtype=torch.int64)


class ShownWeight(nn.Module):
    """Chooses action 0, and writes its only weight into each frame as ``"weight"``."""

    def __init__(self, weight: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(float(weight)))

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        n = len(observation)
        return torch.zeros(n, dtype=torch.int64), {"weight": self.weight.detach().expand(n)}


class GreedyPolicy(nn.Module):
    """The best action of a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 2)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.net(observation).argmax(-1)


class CategoricalPolicy(nn.Module):
    """A distribution whose logits come from a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 2)

    def forward(self, observation: torch.Tensor) -> Categorical:
        return Categorical(logits=self.net(observation))


class SummingPolicy(nn.Module):
    """Acts by the sum of an observation, and writes that sum into the frame as ``"sum"``."""

    def forward(self, observation: torch.Tensor) -> Any:
        total = observation.sum(-1)
        return total.long() % 5, {"sum": total}
