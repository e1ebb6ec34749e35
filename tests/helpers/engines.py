"""Rollouts of an engine as batches, and a policy that shows which weights chose its actions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from torch import nn

from distcollect.policy.live_weights import LiveWeights
from distcollect.rollout.assemble import assemble
from distcollect.rollout.header import Header, Rollout
from distcollect.rollout.slab import Slab


def collect(
    engine: Any, steps: int, slab: Slab | None = None, *, mask: bool = False, **kwargs: Any
) -> TensorDict:
    """The next rollout as a batch ``[n, steps]``; with a mask if it is padded, or if asked for."""
    slab = slab or Slab(engine.layout, steps)
    engine.collect(slab, **kwargs)
    header = Header(0, 0, 0, slab.num_frames, slab.num_steps, 0, (0, 0))
    rollout = Rollout(header, [tensor.clone() for tensor in slab.tensors()])
    return assemble(engine.layout, [rollout], mask=mask or slab.num_frames < slab.reward.size)


class Told(nn.Module):
    """The extra is its one weight; ``at_call`` gets the number of each call."""

    def __init__(self, at_call: Callable[[int], None] = lambda call: None) -> None:
        super().__init__()
        self.told = nn.Parameter(torch.zeros(()))
        self.register_buffer("also", torch.zeros(()))
        self.at_call = at_call
        self.calls = 0

    def forward(self, observation: torch.Tensor) -> Any:
        assert self.told == self.also, "torn"
        told = self.told.expand(len(observation)).clone()
        self.calls += 1
        self.at_call(self.calls)
        return (observation.double().sum(-1) * 1000).floor().long() % 2, {"told": told}


def offer(weights: LiveWeights, version: int) -> None:
    """Commit weights that are all this number."""
    buffer = weights.spare()
    for view in weights.layout.views(buffer):
        view.fill_(version)
    weights.commit(buffer, version)
