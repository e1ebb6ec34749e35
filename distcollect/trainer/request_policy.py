"""Whom to ask for a rollout, and which rollout to hand on: in sync mode, or in one of three others.

Pure decisions, as in :mod:`.schedule`: no clock, no thread, no socket. Nothing here locks; the
caller does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from distcollect.config import Staleness
from distcollect.trainer.staleness import Pacer, SentVersions, Ticket
from distcollect.trainer.worker_slots import Asked, BatchPlan, Seat, Seats


class Order:
    """What all have in common. Most of what they are told means nothing to some of them.

    Attributes:
        frames_asked: of rollouts that were asked for, without those given up.
        ends_early: those that collect for this batch are to deliver what they have.
    """

    def __init__(
        self,
        plan: BatchPlan,
        seats: Seats,
        versions: SentVersions,
        acknowledged: Callable[[int], int],
    ) -> None:
        """Nothing was asked for yet.

        Args:
            plan: what is to be gathered.
            seats: who is there.
            versions: which weights were sent to whom.
            acknowledged: worker_id to the newest version that it has.
        """
        self.frames_asked = 0
        self.ends_early = False
        self._plan = plan
        self._seats = seats
        self._versions = versions
        self._acknowledged = acknowledged
        self._num_asked = 0

    def is_up_to_date(self, worker_id: int) -> bool:
        """Whether a worker has the newest weights that were sent to it."""
        return self._acknowledged(worker_id) >= self._versions.newest(worker_id)

    def whom(self, arrived: Sequence[Asked]) -> Iterator[Seat]:
        """Those to be asked now, each in view of what came of asking the one before.

        Args:
            arrived: what lies ready, there or here, in that order; as it is at each step.
        """
        raise NotImplementedError

    def choose(self, arrived: Sequence[Asked]) -> Asked | None:
        """What is to be handed on next, here or not yet; None if that is still to come."""
        raise NotImplementedError("a batch of sync mode is of all together")

    def choose_to_give(self, lie_there: Sequence[Asked]) -> Asked:
        """Which of these is handed over to another trainer."""
        return lie_there[0]

    def may_end_early(self, num_arrived: int) -> bool:
        """Whether so many of a batch's rollouts are enough to end the others early."""
        return False

    # What it is told.

    def begin(self) -> None:
        """The user waits for a batch."""

    def end(self) -> None:
        """The user has it, or waits no longer."""

    def published(self) -> None:
        """New weights are on their way; call it after :meth:`SentVersions.publish`."""

    def asked(self, seat: Seat) -> Ticket:
        """A worker is asked for a rollout."""
        self.frames_asked += self._plan.rollout_frames
        self._num_asked += 1
        seat.last_asked = self._num_asked
        return self._ticket(seat.worker_id, self._acknowledged(seat.worker_id))

    def _ticket(self, worker_id: int, acknowledged: int) -> Ticket:
        return Ticket(worker_id, acknowledged)

    def arrived(self, ticket: Ticket, version: int) -> None:
        """It lies ready, and no frame of it has a version below this."""
        ticket.version = version

    def delivered(self, asked: Asked) -> None:
        """The user got it by :meth:`choose` or :meth:`choose_to_give`."""

    def given_up(self, asked: Asked, *, is_wanted: bool) -> None:
        """The user will not get it; ``is_wanted``: but is to get another one for it."""
        self.frames_asked -= self._plan.rollout_frames

    def given_up_all(self) -> None:
        """Nothing that was asked for until now is wanted any more."""

    def _longest_idle_first(self) -> list[Seat]:
        return sorted(self._seats.staying(), key=lambda seat: seat.last_asked)

    def _has_asked_for_all(self) -> bool:
        limit = self._plan.num_frames
        return limit is not None and self.frames_asked >= limit


class Together(Order):
    """Sync mode: one rollout of every worker, all for the same batch."""

    _batch = 0
    _num_wanted = 0  # rollouts of this batch that nobody was asked for

    def begin(self) -> None:
        self._batch += 1
        self._num_wanted = self._plan.num_rollouts
        self.ends_early = False

    def whom(self, arrived: Sequence[Asked]) -> Iterator[Seat]:
        return (seat for seat in self._longest_idle_first() if self._may_ask(seat))

    def _may_ask(self, seat: Seat) -> bool:
        if self._num_wanted <= 0 or seat.unsettled or not self.is_up_to_date(seat.worker_id):
            return False
        if seat.batch != self._batch:
            return True
        # A second share is one that nobody else is there for.
        others = sum(
            other.batch != self._batch and not other.leaving for other in self._seats.collecting()
        )
        awaited = self._seats.num_coming if self._plan.waits_for_missing else 0
        return self._num_wanted > others + awaited

    def asked(self, seat: Seat) -> Ticket:
        seat.batch = self._batch
        self._num_wanted -= 1
        return super().asked(seat)

    def given_up(self, asked: Asked, *, is_wanted: bool) -> None:
        super().given_up(asked, is_wanted=is_wanted)
        if is_wanted:
            self._num_wanted += 1

    def given_up_all(self) -> None:
        self._num_wanted = 0

    def may_end_early(self, num_arrived: int) -> bool:
        share = self._plan.preemptive_threshold
        return share is not None and num_arrived >= math.ceil(share * self._plan.num_rollouts)


class Ahead(Order):
    """Async mode: each worker always has a request open, and what came here first goes first."""

    def whom(self, arrived: Sequence[Asked]) -> Iterator[Seat]:
        # Who has waited longest comes first: a bound on staleness may not leave room for all.
        for seat in self._longest_idle_first():
            if self._may_ask(seat) and not self._has_asked_for_all():
                yield seat

    def _may_ask(self, seat: Seat) -> bool:
        if seat.collecting or not seat.has_a_slab:
            return False
        # Not with the weights of long ago that a new process starts with.
        return bool(seat.num_requests) or self.is_up_to_date(seat.worker_id)

    def choose(self, arrived: Sequence[Asked]) -> Asked | None:
        """The first that is here, but none of a worker's before an older one of it."""
        passed_over: set[Seat] = set()
        for asked in arrived:
            if asked.rollout is not None and asked.seat not in passed_over:
                return asked
            passed_over.add(asked.seat)
        return None


class Paced(Ahead):
    """Async mode with a bound on staleness: as the :class:`~.schedule.Pacer` has it."""

    def __init__(
        self,
        plan: BatchPlan,
        seats: Seats,
        versions: SentVersions,
        acknowledged: Callable[[int], int],
        max_policy_lag: int,
    ) -> None:
        super().__init__(plan, seats, versions, acknowledged)
        self._pacer = Pacer(max_policy_lag, versions)

    def begin(self) -> None:
        self._pacer.awaited()

    def published(self) -> None:
        self._pacer.published()

    def _may_ask(self, seat: Seat) -> bool:
        return super()._may_ask(seat) and self._pacer.may_ask(
            seat.worker_id, self._acknowledged(seat.worker_id)
        )

    def choose(self, arrived: Sequence[Asked]) -> Asked | None:
        ticket = self._pacer.choose([asked.ticket for asked in arrived])
        return next((asked for asked in arrived if asked.ticket is ticket), None)

    def choose_to_give(self, lie_there: Sequence[Asked]) -> Asked:
        return max(
            lie_there, key=lambda a: self._versions.lag(a.ticket.worker_id, a.ticket.version)
        )

    def _ticket(self, worker_id: int, acknowledged: int) -> Ticket:
        return self._pacer.ask(worker_id, acknowledged)

    def arrived(self, ticket: Ticket, version: int) -> None:
        self._pacer.arrived(ticket, version)

    def delivered(self, asked: Asked) -> None:
        self._pacer.delivered(asked.ticket)

    def given_up(self, asked: Asked, *, is_wanted: bool) -> None:
        super().given_up(asked, is_wanted=is_wanted)
        self._pacer.given_up(asked.ticket)


class InTurn(Order):
    """Async mode, the same each time: one rollout of each worker after the other."""

    _is_awaited = False

    def begin(self) -> None:
        self._is_awaited = True

    def end(self) -> None:
        self._is_awaited = False

    def whom(self, arrived: Sequence[Asked]) -> Iterator[Seat]:
        # Not before the user wants a batch: until then more weights may be published.
        if not self._is_awaited:
            return
        for seat in sorted(self._seats.staying(), key=_turn):
            if _is_idle(seat, arrived):
                if not self.is_up_to_date(seat.worker_id):
                    return  # or others would be asked before it, or not, as it happens
                if not self._has_asked_for_all():
                    yield seat

    def choose(self, arrived: Sequence[Asked]) -> Asked | None:
        """That of the worker whose turn it is, once all others that can be are at work."""
        in_line = self._seats.collecting()
        for asked in arrived:
            if asked.rollout is not None and asked.seat not in in_line:
                return asked  # of one that is gone, whose turn won't come any more
        if any(
            _is_idle(seat, arrived) and not self.is_up_to_date(seat.worker_id)
            for seat in self._seats.staying()
        ):
            return None
        if self._has_asked_for_all():  # who has nothing to give won't be asked for anything
            in_line = [seat for seat in in_line if not _is_idle(seat, arrived)]
        due = min(in_line, key=_turn, default=None)
        return next((asked for asked in arrived if asked.seat is due), None)

    def delivered(self, asked: Asked) -> None:
        asked.seat.turn += 1


def order_for(
    plan: BatchPlan,
    staleness: Staleness | None,
    seats: Seats,
    versions: SentVersions,
    acknowledged: Callable[[int], int],
) -> Order:
    """The one that goes with a plan; its arguments as :class:`Order` has them."""
    if plan.sync:
        return Together(plan, seats, versions, acknowledged)
    if plan.in_turn:
        return InTurn(plan, seats, versions, acknowledged)
    if staleness is not None and staleness.mode == "pace":
        return Paced(plan, seats, versions, acknowledged, staleness.max_policy_lag)
    return Ahead(plan, seats, versions, acknowledged)


def _turn(seat: Seat) -> tuple[int, int]:
    return seat.turn, seat.worker_id


def _is_idle(seat: Seat, arrived: Sequence[Asked]) -> bool:
    """Whether it has nothing to do, and nothing of it waits to be handed on."""
    return not seat.unsettled and not any(asked.seat is seat for asked in arrived)
