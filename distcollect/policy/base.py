"""The interface through which the engine calls policies."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict.nn import InteractionType
from torch import nn
from torch.distributions import Distribution, Independent, TransformedDistribution

from distcollect.common.random_state import random_state_restored
from distcollect.errors import ArgumentError, PolicyError
from distcollect.policy.live_weights import buffers_restored
from distcollect.policy.noise import NoiseProcess
from distcollect.policy.recurrent import PolicyState
from distcollect.rollout.spaces import Leaf


class Exploration(str, enum.Enum):
    """How actions are chosen where the policy has, or returns, a distribution.

    Attributes:
        RANDOM: draw them from the distribution.
        DETERMINISTIC: take its ``deterministic_sample``, mode or mean, or what its transforms make
            of the mode or mean of its base. (A TensorDict policy has its own rule for some
            distributions.)
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
                "'deterministic' (take its mode or mean), 'mode', 'mean' or 'median'"
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
        action = self.find_action(distribution)
        if action is None:
            others = [*Exploration][::-1]
            works = [each.value for each in others if each.find_action(distribution) is not None]
            raise self.undefined(f", {type(distribution).__name__},", works)
        return action

    def find_action(self, distribution: Distribution) -> torch.Tensor | None:
        """Return an action of a distribution; None if it has no such value."""
        if self is Exploration.RANDOM:
            return distribution.sample()
        if self is Exploration.DETERMINISTIC:
            return _deterministic(distribution)
        return _value(distribution, self.value)

    def undefined(self, name: str = "", works: Sequence[str] = ("mode", "random")) -> PolicyError:
        """Return the error for a policy's distribution, called ``name``, that has no such value.

        Args:
            name: the kind of the distribution.
            works: the values of the exploration types that it has.
        """
        is_deterministic = self is Exploration.DETERMINISTIC
        lacks = "mode, mean or deterministic_sample" if is_deterministic else self.value
        advice = " or ".join(map(repr, works))
        return PolicyError(
            f"exploration_type={self.value!r}: the policy's distribution{name} has no {lacks}; "
            f"use {advice}" + is_deterministic * ", and evaluate(deterministic=False)"
        )


def _deterministic(distribution: Distribution) -> torch.Tensor | None:
    """Return the first of deterministic_sample, mode and mean that a distribution has.

    Each element is the first that is not NaN, so that an env's action is the same beside any other
    env's. If it has none, but is made of another distribution by transforms, return what they make
    of the value of that: for a normal distribution behind a tanh, tanh(mean), as in SAC (Haarnoja
    et al., "Soft actor-critic algorithms and applications", 2018).
    """
    chosen: torch.Tensor | None = None
    for value in _candidates(distribution):
        if value is not None:
            chosen = value if chosen is None else chosen.where(~chosen.isnan(), value)
            if not chosen.isnan().any():
                break
    return chosen  # NaN, if the policy itself returned NaN


def _candidates(distribution: Distribution) -> Iterator[torch.Tensor | None]:
    for name in ("deterministic_sample", "mode", "mean"):
        yield _value(distribution, name)
    if isinstance(distribution, Independent | TransformedDistribution):
        value = _deterministic(distribution.base_dist)
        for transform in getattr(distribution, "transforms", ()) if value is not None else ():
            value = transform(value)
        yield value


def _value(distribution: Distribution, name: str) -> torch.Tensor | None:
    """Return the mode, mean, median or deterministic_sample of a distribution; None: it has none.

    A distribution of whole numbers has only values that are whole.
    """
    value: torch.Tensor | None
    try:
        value = getattr(distribution, name, None)
        if value is None and name == "median":  # torch's distributions have none
            value = distribution.icdf(torch.tensor(0.5))
    except (NotImplementedError, RuntimeError):  # TorchRL's TanhNormal raises the latter
        return None
    if value is not None and is_discrete(distribution):
        if name == "mode":  # NaN where both values of a Bernoulli are as likely
            value = value.nan_to_num()
        if not torch.equal(value, value.round()):
            return None
    return value


def is_discrete(distribution: Distribution) -> bool:
    """Return True if a distribution is one of whole numbers."""
    try:
        return bool(getattr(distribution.support, "is_discrete", False))
    except (NotImplementedError, TypeError):  # a class may have none; TorchRL's TanhNormal raises
        return False


# ``[n, *shape]`` for each leaf of the action, and for each of the extras. Arrays, so that a random
# policy needs no torch: after each sleep of an env, every part of it that a step uses takes long.
PolicyOutput: TypeAlias = tuple[Sequence[np.ndarray], Sequence[np.ndarray]]


class Woken(Exception):
    """A policy that waits for another process was told that there is something else to do first.

    Nothing has changed: it can be called again.
    """


class Renewed(Woken):
    """Where an episode begins, the state is now that of newer weights: it is to be called again."""


class Policy(ABC):
    """Chooses the actions of n envs at once.

    Attributes:
        module: the module that has the weights; None if there are none.
        state: what a recurrent policy carries from frame to frame; None if it is not recurrent.
        noises: what changes the chosen actions, in this order.
    """

    module: nn.Module | None = None
    state: PolicyState | None = None
    noises: Sequence[NoiseProcess] = ()

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

    def begin(self, rows: Sequence[int]) -> None:
        """Episodes begin in ``rows``: forget the ones before."""
        if self.state is not None:
            self.state.begin(rows)
        for noise in self.noises:
            noise.begin(rows)

    def exploring(self) -> AbstractContextManager[Any]:
        """Return a context for the calls of a rollout; it can be entered once."""
        return torch.no_grad()

    def try_out(self) -> Sequence[np.ndarray]:
        """Call the policy for the first time, to learn which extras it returns; its action.

        The global random generators, which users seed before, and the policy's buffers stay as they
        are.
        """
        with random_state_restored(), buffers_restored(self.module), self.exploring():
            return self()[0]
