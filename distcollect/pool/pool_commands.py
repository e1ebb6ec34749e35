"""What the core of the pool commands its shell, see :mod:`.pool_core`.

A command only sets something going. What comes of it, even at once, is an event for the core after
the one that it handles now.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Protocol

from distcollect.pool.worker_slots import RolloutRequest, WorkerSlot
from distcollect.telemetry.recorder import Activity
from distcollect.transport.protocol import Offer


class Wanted(Enum):
    """Says what the user's thread waits for.

    Attributes:
        ALL: a sync batch.
        NEXT: the next rollout.
        REFERENCE: the next rollout, for another trainer to take.
    """

    ALL = "all"
    NEXT = "next"
    REFERENCE = "reference"


class PoolCommands(Protocol):
    """Executes what the core of the pool decides.

    If a call to a worker fails, that is answered by ``failed``.
    """

    def collect(self, request: RolloutRequest) -> None:
        """Request a rollout; answered by ``offered``."""

    def preempt(self, request: RolloutRequest) -> None:
        """Tell a worker to end this rollout early."""

    def fetch(self, request: RolloutRequest, offer: Offer) -> None:
        """Move a rollout here; answered by ``fetched`` or ``not_fetched``."""

    def keep(self, request: RolloutRequest, keep_s: float) -> None:
        """Have a worker keep a rollout for another trainer.

        Answered by ``kept``, and then by ``kept_no_longer``.
        """

    def take_back(self, request: RolloutRequest) -> None:
        """Tell a worker to keep a rollout no longer."""

    def set_up(self, slot: WorkerSlot, method: Callable[..., Any], args: Sequence[Any]) -> None:
        """Call a method of a new worker's service; answered by ``set_up``."""

    def report_failure(self, slot: WorkerSlot, error: BaseException, *, is_final: bool) -> None:
        """Tell the supervision that a worker failed at what it was asked for.

        ``is_final``: so did all processes, so that the run ends.
        """

    def report_drained(self, slot: WorkerSlot) -> None:
        """Tell the supervision that a worker that is to leave owes nothing any more."""

    def note_activity(self, activity: Activity) -> None:
        """The user's thread waits for something else from now on."""

    def deliver(self, wanted: Wanted, requests: Sequence[RolloutRequest]) -> None:
        """Give the user what it waits for: these requests, in the order of their arrival."""

    def wake_user(self) -> None:
        """Wake the user's threads: what they wait for may have come."""
