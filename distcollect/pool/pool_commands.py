"""The commands that the core of the pool gives its shell, see :mod:`.pool_core`.

They are not frozen, though nobody changes one: that would make each take three times as long to
make, and there are two for each rollout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

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


@dataclass(slots=True)
class Collect:
    """Request rollouts; each is answered by ``offered`` or ``not_collected``.

    It is one command for all workers of a sync batch: garbage collection looks at each object.
    """

    requests: list[RolloutRequest]


@dataclass(slots=True)
class Preempt:
    """Tell a worker to end this rollout early."""

    request: RolloutRequest


@dataclass(slots=True)
class Fetch:
    """Move a rollout here; answered by ``fetched`` or ``not_fetched``.

    Attributes:
        began_at: when the shell did it, in nanoseconds.
    """

    request: RolloutRequest
    offer: Offer
    began_at: int = 0


@dataclass(slots=True)
class Decline:
    """Tell a worker that a rollout is not fetched, or not used."""

    offer: Offer


@dataclass(slots=True)
class Keep:
    """Have a worker keep a rollout for another trainer; answered by ``kept`` or ``not_kept``."""

    request: RolloutRequest
    keep_s: float


@dataclass(slots=True)
class AwaitTaken:
    """Learn whether another trainer took a rollout; answered by ``taken`` or ``not_kept``."""

    request: RolloutRequest


@dataclass(slots=True)
class TakeBack:
    """Tell a worker to keep a rollout no longer."""

    request: RolloutRequest


@dataclass(slots=True)
class SetUp:
    """Call a method of a new worker's service; answered by ``set_up`` or ``not_set_up``."""

    slot: WorkerSlot
    method: Callable[..., Any]
    args: Sequence[Any]


@dataclass(slots=True)
class ReportFailure:
    """Tell the supervision that a worker failed at what it was asked for.

    Attributes:
        is_final: so did all processes, so that the run ends.
    """

    slot: WorkerSlot
    error: BaseException
    is_final: bool


@dataclass(slots=True)
class ReportDrained:
    """Tell the supervision that a worker that is to leave owes nothing any more."""

    slot: WorkerSlot


@dataclass(slots=True)
class NoteActivity:
    """The user's thread waits for something else from now on."""

    activity: Activity


@dataclass(slots=True)
class Deliver:
    """Give the user what it waits for: these requests, in the order of their arrival."""

    wanted: Wanted
    requests: list[RolloutRequest]


@dataclass(slots=True)
class WakeUser:
    """Wake the user's threads that wait for a worker, for setup calls, or for the end."""


Command: TypeAlias = (
    Collect
    | Preempt
    | Fetch
    | Decline
    | Keep
    | AwaitTaken
    | TakeBack
    | SetUp
    | ReportFailure
    | ReportDrained
    | NoteActivity
    | Deliver
    | WakeUser
)
