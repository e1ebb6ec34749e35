"""The interface through which the engine calls policies."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch
from tensordict.nn import InteractionType
from torch import nn

from distcollect.errors import ArgumentError
from distcollect.policy.recurrent import PolicyState
from distcollect.rollout.spaces import Leaf


class Exploration(str, enum.Enum):
    """How actions are chosen where the policy returns a distribution.

    Attributes:
        RANDOM: draw them from the distribution.
        DETERMINISTIC: take its mode.
    """

    RANDOM = "random"
    DETERMINISTIC = "deterministic"

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
                f"exploration_type={value!r}: use 'random' (draw from the policy's distribution) "
                "or 'deterministic' (take its mode)"
            ) from None

    @property
    def interaction(self) -> InteractionType:
        """The same as the interaction type of TensorDict policies."""
        return (
            InteractionType.RANDOM if self is Exploration.RANDOM else InteractionType.DETERMINISTIC
        )


# ``[n, *shape]`` for each leaf of the action, and for each of the extras, on the CPU.
PolicyOutput: TypeAlias = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]


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
    def __call__(self) -> PolicyOutput:
        """Choose actions for the observations that are in the env batch's arrays now.

        Returns:
            Action and extras. A :class:`~distcollect.policy.random.RandomPolicy` returns no
            extras, even where it takes the place of a policy that has some.

        Raises:
            PolicyError: the policy raised, or its output has another shape than before.
        """

    @abstractmethod
    def for_rows(self, rows: Sequence[int]) -> PolicyOutput:
        """Like a call, but only for ``rows``; ignore what it returns for other rows."""

    @abstractmethod
    def seed(self, seeds: Sequence[int]) -> None:
        """From now on draw for env i from a stream of its own, seeded with ``seeds[i]``."""

    def exploring(self) -> AbstractContextManager[Any]:
        """The context in which the calls of a rollout are made. It may be left more than once."""
        return Contexts(torch.no_grad())

    def try_out(self) -> None:
        """Call the policy for the first time, to learn which extras it returns."""
        with self.exploring():
            self()


class Contexts:
    """Several contexts, which can be left again if an exception broke off the first time."""

    def __init__(self, *contexts: AbstractContextManager[Any]) -> None:
        self._contexts = contexts
        self._entered: list[tuple[Any, AbstractContextManager[Any]]] = []

    def __enter__(self) -> None:
        for context in self._contexts:
            self._entered.append((context.__enter__(), context))

    def __exit__(self, *exc: Any) -> None:
        while self._entered:
            self._entered[-1][1].__exit__(*exc)
            self._entered.pop()
