"""Random actions."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from distcollect.policy.base import Policy, PolicyOutput
from distcollect.policy.recurrent import PolicyState
from distcollect.rollout.spaces import flatten, leaves_of


class RandomPolicy(Policy):
    """Actions drawn from the action space, one generator for each env."""

    def __init__(
        self, space: gym.Space[Any], num_envs: int, state: PolicyState | None = None
    ) -> None:
        """Draw actions for ``num_envs`` envs.

        Args:
            space: action space of a single env.
            num_envs: n.
            state: state of the recurrent policy whose place the random actions take; it only
                learns which frames are the first of an episode.
        """
        self.state = state
        leaves = leaves_of(space, "action")
        self._columns = [((num_envs, *leaf.shape), leaf.numpy_dtype) for leaf in leaves]
        self._has_parts = isinstance(space, gym.spaces.Dict | gym.spaces.Tuple)
        # A space draws from a generator of its own, so each env needs its own copy.
        self._spaces = [copy.deepcopy(space) for _ in range(num_envs)]
        for each in self._spaces:
            each.seed(None)  # otherwise all copies would draw the same
        self._rows = range(num_envs)

    def seed(self, seeds: Sequence[int]) -> None:
        for space, seed in zip(self._spaces, seeds, strict=True):
            space.seed(seed)

    def __call__(self, rows: Sequence[int] | None = None) -> PolicyOutput:
        if self.state is not None:
            self.state.skip(rows)
        columns = [np.zeros(shape, dtype) for shape, dtype in self._columns]
        # The generators of other rows do not advance.
        for row in self._rows if rows is None else rows:
            space = self._spaces[row]
            if self._has_parts:
                for column, part in zip(columns, flatten(space, space.sample()), strict=True):
                    column[row] = part
            else:
                columns[0][row] = space.sample()
        return columns, ()
