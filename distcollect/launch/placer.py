"""How another scheduler, such as Ray, is asked to start supervisors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from distcollect.net.messages import TrainerAddress


class PlacerSettings(Protocol):
    """What to ask another scheduler for."""

    def connect(self) -> Placer:
        """Connect to the scheduler.

        Raises:
            LaunchError: it can't be reached.
        """


class Placer(Protocol):
    """Has a scheduler start one supervisor for each slot, and start it again when it is lost.

    The supervisor for slot w joins as rank w + 1. The methods may be called on several threads.

    Attributes:
        address: this host's, on the network that it shares with the supervisors.
    """

    address: str

    def start(
        self, trainer: TrainerAddress, num_workers: int, given_up: Callable[[int, str], None]
    ) -> None:
        """Request supervisors for the slots from 0 to ``num_workers`` - 1.

        Args:
            trainer: where they join.
            num_workers: see above.
            given_up: called with a slot and the reason, on any thread, if no supervisor for that
                slot will come any more.

        Raises:
            LaunchError: the scheduler refuses.
        """

    def joined(self, worker_id: int) -> None:
        """The supervisor of this slot has joined."""

    def left(self, worker_id: int) -> None:
        """The connection to the supervisor of this slot has ended."""

    @property
    def is_settled(self) -> bool:
        """Return True if no supervisor is expected soon: the missing ones wait for resources."""

    def missing(self) -> str:
        """Say which supervisors have not joined, and what they wait for; "" if none is missing."""

    def close(self) -> None:
        """End all supervisors. Again it does nothing."""
