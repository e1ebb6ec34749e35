"""A user's file with a policy, and with modules that other files use."""

from __future__ import annotations

import torch
from torch import nn

net, unused = nn.Linear(4, 2), nn.Linear(4, 2)
encoder = nn.Linear(4, 4)


def told(observation: torch.Tensor, used: nn.Module = nn.Identity()) -> torch.Tensor:  # noqa: B008
    return net(used(observation))


class Shared:
    """Its class has the module."""

    nets = (net,)

    def unreached(self, observation: torch.Tensor) -> torch.Tensor:
        return unused(observation)


def encoded(observation: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    both = torch.stack([net.weight[0, 0], encoder.weight[0, 0]]).detach()
    return net(encoder(observation)).argmax(-1), {"both": both.expand(len(observation), 2)}
