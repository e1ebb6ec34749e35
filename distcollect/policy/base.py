"""The interface through which the engine calls policies."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict.nn import InteractionType
from torch import nn
from torch.distributions import Distribution

from distcollect.errors import ArgumentError, PolicyError
from distcollect.policy.recurrent import PolicyState
from distcollect.rollout.spaces import Leaf


class Exploration(str, enum.Enum):
    """How actions are chosen where the policy has, or returns, a distribution.

    Attributes:
        RANDOM: draw them from the distribution.
        DETERMINISTIC: take its mode. (A TensorDict policy has its own rule for some distributions.)
        MODE, MEAN, MEDIAN: take this.
    """

    RANDOM = "random"
    DETERMINISTIC = "deterministic"
    MODE = "mode"
    MEAN = "mean"
    MEDIAN = "median"

    @classmethod
    def of(cls, value: object) -> Exploration:
        """Convert a member, its name, or a member of TorchRL's ``ExplorationType``.

        Raises:
            ArgumentError: ``value`` is none of these.
        """
        name = value.name if isinstance(value, enum.Enum) else str(value)
        try:
            return cls(name.lower())
        except ValueError:
            raise ArgumentError(
                f"exploration_type={value!r}: use 'random' (draw from the policy's distribution), "
                "'deterministic' (take its mode), 'mode', 'mean' or 'median'"
            ) from None

    @property
    def interaction(self) -> InteractionType:
        """The interaction type of TensorDict policies."""
        return InteractionType(self.value)

    def choose(self, distribution: Distribution) -> torch.Tensor:
        """Return an action of a distribution.

        Raises:
            PolicyError: the distribution has no such value.
        """
        if self is Exploration.RANDOM:
            return distribution.sample()
        name = "mode" if self is Exploration.DETERMINISTIC else self.value
        action: torch.Tensor | None
        try:
            action = getattr(distribution, name, None)  # torch's distributions have no median
            action = distribution.icdf(torch.tensor(0.5)) if action is None else action
            if is_discrete(distribution):
                if name == "mode":  # NaN where both values of a Bernoulli are as likely
                    action = action.nan_to_num()
                if not torch.equal(action, action.round()):
                    action = None
        except NotImplementedError:
            action = None
        if action is None:
            raise self.undefined(f", {type(distribution).__name__},")
        return action

    def undefined(self, name: str = "") -> PolicyError:
        """Return the error for a policy's distribution, called ``name``, that has no such value."""
        return PolicyError(
            f"exploration_type={self.value!r}: the policy's distribution{name} has no "
            f"{self.value}; use 'mode', the most likely action, or 'random'"
        )


def is_discrete(distribution: Distribution) -> bool:
    """Return True if a distribution is one of whole numbers."""
    try:
        return bool(getattr(distribution.support, "is_discrete", False))
    except NotImplementedError:  # a class of the user's needs no support
        return False


# ``[n, *shape]`` for each leaf of the action, and for each of the extras. Arrays, so that a random
# policy needs no torch: after each sleep of an env, every part of it that a step uses takes long.
PolicyOutput: TypeAlias = tuple[Sequence[np.ndarray], Sequence[np.ndarray]]


class Policy(ABC):
    """Chooses the actions of n envs at once.

    Attributes:
        module: the module that has the weights; None if there are none.
        state: what a recurrent policy carries from frame to frame; None if it is not recurrent.
    """

    module: nn.Module | None = None
    state: PolicyState | None = None

    @property
    def extras(self) -> tuple[Leaf, ...]:
        """Leaves that the policy returns besides the action; known after the first call."""
        return ()

    @abstractmethod
    def __call__(self, rows: Sequence[int] | None = None) -> PolicyOutput:
        """Choose actions for the observations that are in the env batch's arrays now.

        Args:
            rows: choose only for these, and ignore what is returned for others; None: for all.

        Returns:
            Action and extras. A :class:`~distcollect.policy.random.RandomPolicy` returns no
            extras, even where it takes the place of a policy that has some.

        Raises:
            PolicyError: the policy raised, or its output has another shape than before.
        """

    @abstractmethod
    def seed(self, seeds: Sequence[int]) -> None:
        """From now on draw for env i from a stream of its own, seeded with ``seeds[i]``."""

    def exploring(self) -> AbstractContextManager[Any]:
        """Return a context for the calls of a rollout; it can be entered once."""
        return torch.no_grad()

    def try_out(self) -> None:
        """Call the policy for the first time, to learn which extras it returns."""
        with self.exploring():
            self()
