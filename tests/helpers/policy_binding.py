"""Policies that are bound to observations of any space."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import torch
from helpers.counting_envs import ACTIONS, OBSERVATIONS
from torch import nn

from distcollect.policy.user import UserPolicy
from distcollect.rollout.spaces import Arrays, flatten, leaves_of

N = 3


def observations(space: gym.Space[Any], n: int = N) -> Arrays:
    space.seed(7)
    rows = [list(flatten(space, space.sample())) for _ in range(n)]
    return {
        leaf.key: np.stack([np.asarray(row[index], leaf.numpy_dtype) for row in rows])
        for index, leaf in enumerate(leaves_of(space, "observation"))
    }


def bind(
    policy: Any, observation: str = "box32", action: str = "discrete", n: int = N, **kwargs: Any
) -> tuple[UserPolicy, Arrays]:
    space = OBSERVATIONS[observation].space
    arrays = observations(space, n)
    return UserPolicy(policy, arrays, space, ACTIONS[action], **kwargs), arrays


def call(policy: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any, Arrays]:
    """The actions, extras and observations of the second call; the first one is special."""
    bound, arrays = bind(policy, *args, **kwargs)
    space = args[1] if len(args) > 1 else kwargs.get("action", "discrete")
    keys = [leaf.key for leaf in leaves_of(ACTIONS[space], "action")]
    with bound.exploring():
        bound()
        chosen, written = ([*map(torch.from_numpy, values)] for values in bound())
    for leaf, value in zip(bound.extras, written, strict=True):
        assert value.dtype == leaf.dtype
        assert value.shape[1:] == leaf.shape
    actions = dict(zip(keys, chosen, strict=True))
    extras = {leaf.key: value for leaf, value in zip(bound.extras, written, strict=True)}
    return actions, extras, arrays


def pick(observation: Any) -> torch.Tensor:
    return observation.sum(-1).abs().long() % 5


class Module(nn.Module):
    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return pick(observation)
