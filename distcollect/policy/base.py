"""What every policy offers to the engine."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from tensordict.nn import InteractionType
from torch import nn

from distcollect.errors import ArgumentError
from distcollect.policy.recurrent import PolicyState
from distcollect.rollout.spaces import Leaf


class Exploration(str, enum.Enum):
    """How actions are chosen, where the policy returns a distribution.

    Attributes:
        RANDOM: they are drawn from it.
        DETERMINISTIC: its mode is taken.
    """

    RANDOM = "random"
    DETERMINISTIC = "deterministic"

    @classmethod
    def of(cls, value: object) -> Exploration:
        """From a name, one of these, or an enum with such names (TorchRL's ``ExplorationType``).

        Raises:
            ArgumentError: it is none of them.
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
        """The same, as TensorDict policies take it."""
        return (
            InteractionType.RANDOM if self is Exploration.RANDOM else InteractionType.DETERMINISTIC
        )


class Policy(ABC):
    """Chooses the actions of n envs at once.

    Attributes:
        module: what has the weights, None if there are none.
        extras: leaves it writes beside the action; known after the first call.
        state: what a recurrent policy carries from frame to frame, None if it isn't one.
    """

    module: nn.Module | None = None
    extras: tuple[Leaf, ...] = ()
    state: PolicyState | None = None

    @abstractmethod
    def __call__(self) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """Choose actions for the observations that lie in the env batch's arrays now.

        Returns:
            ``[n, *shape]`` of each of the action's leaves, and of each of :attr:`extras`, on the
            CPU. Without a policy of the user's there are no extras.
        """

    @abstractmethod
    def for_rows(
        self, rows: Sequence[int]
    ) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """As a call, for the sake of some rows: what it gives for others is of no use."""

    @abstractmethod
    def seed(self, seeds: Sequence[int]) -> None:
        """Draw what env i needs from a stream of its own from now on, which ``seeds[i]`` sets."""

    def exploring(self) -> AbstractContextManager[Any]:
        """The context in which a whole rollout's calls are made."""
        return torch.no_grad()

    def try_out(self) -> None:
        """Call it for the first time, which tells what it writes."""
        with self.exploring():
            self()
