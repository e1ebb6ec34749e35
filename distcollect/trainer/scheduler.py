"""Whom to ask for a rollout, and which rollout to hand on: in sync mode, or in one of three others.

Pure decisions, as in :mod:`.schedule`: no clock, no thread, no socket. Nothing here locks; the
caller does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from distcollect.config import Staleness
from distcollect.trainer.staleness import Pacer, SentVersions, StalenessTicket
from distcollect.trainer.worker_slots import BatchPlan, RolloutRequest, WorkerSlot, WorkerSlots


class Scheduler:
    """What all have in common. Most of what they are told means nothing to some of them.

    Attributes:
        frames_asked: of rollouts that were asked for, without those given up.
        ends_early: those that collect for this batch are to deliver what they have.
    """

    def __init__(
        self,
        plan: BatchPlan,
        slots: WorkerSlots,
        versions: SentVersions,
        acknowledged: Callable[[int], int],
    ) -> None:
        """Nothing was asked for yet.

        Args:
            plan: what is to be gathered.
            slots: who is there.
            versions: which weights were sent to whom.
            acknowledged: worker_id to the newest version that it has.
        """
        self.frames_asked = 0
        self.ends_early = False
        self._plan = plan
        self._slots = slots
        self._versions = versions
        self._acknowledged = acknowledged
        self._num_asked = 0

    def is_up_to_date(self, worker_id: int) -> bool:
        """Whether a worker has the newest weights that were sent to it."""
        return self._acknowledged(worker_id) >= self._versions.newest(worker_id)

    def next_slots(self, arrived: Sequence[RolloutRequest]) -> Iterator[WorkerSlot]:
        """Those to be asked now, each in view of what came of asking the one before.

        Args:
            arrived: what lies ready, there or here, in that order; as it is at each step.
        """
        raise NotImplementedError

    def choose(self, arrived: Sequence[RolloutRequest]) -> RolloutRequest | None:
        """What is to be handed on next, here or not yet; None if that is still to come."""
        raise NotImplementedError("a batch of sync mode is of all together")

    def choose_to_give(self, lie_there: Sequence[RolloutRequest]) -> RolloutRequest:
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

    def request(self, slot: WorkerSlot) -> StalenessTicket:
        """A worker is asked for a rollout."""
        self.frames_asked += self._plan.rollout_frames
        self._num_asked += 1
        slot.last_asked = self._num_asked
        return self._ticket(slot.worker_id, self._acknowledged(slot.worker_id))

    def _ticket(self, worker_id: int, acknowledged: int) -> StalenessTicket:
        return StalenessTicket(worker_id, acknowledged)

    def arrived(self, ticket: StalenessTicket, version: int) -> None:
        """It lies ready, and no frame of it has a version below this."""
        ticket.version = version

    def delivered(self, request: RolloutRequest) -> None:
        """The user got it by :meth:`choose` or :meth:`choose_to_give`."""

    def given_up(self, request: RolloutRequest, *, is_wanted: bool) -> None:
        """The user will not get it; ``is_wanted``: but is to get another one for it."""
        self.frames_asked -= self._plan.rollout_frames

    def given_up_all(self) -> None:
        """Nothing that was asked for until now is wanted any more."""

    def _longest_idle_first(self) -> list[WorkerSlot]:
        return sorted(self._slots.staying(), key=lambda slot: slot.last_asked)

    def _has_asked_for_all(self) -> bool:
        limit = self._plan.num_frames
        return limit is not None and self.frames_asked >= limit


class SyncScheduler(Scheduler):
    """Sync mode: one rollout of every worker, all for the same batch."""

    _batch = 0
    _num_wanted = 0  # rollouts of this batch that nobody was asked for

    def begin(self) -> None:
        self._batch += 1
        self._num_wanted = self._plan.num_rollouts
        self.ends_early = False

    def next_slots(self, arrived: Sequence[RolloutRequest]) -> Iterator[WorkerSlot]:
        return (slot for slot in self._longest_idle_first() if self._may_ask(slot))

    def _may_ask(self, slot: WorkerSlot) -> bool:
        if self._num_wanted <= 0 or slot.unsettled or not self.is_up_to_date(slot.worker_id):
            return False
        if slot.batch != self._batch:
            return True
        # A second share is one that nobody else is there for.
        others = sum(
            other.batch != self._batch and not other.leaving for other in self._slots.collecting()
        )
        awaited = self._slots.num_coming if self._plan.waits_for_missing else 0
        return self._num_wanted > others + awaited

    def request(self, slot: WorkerSlot) -> StalenessTicket:
        slot.batch = self._batch
        self._num_wanted -= 1
        return super().request(slot)

    def given_up(self, request: RolloutRequest, *, is_wanted: bool) -> None:
        super().given_up(request, is_wanted=is_wanted)
        if is_wanted:
            self._num_wanted += 1

    def given_up_all(self) -> None:
        self._num_wanted = 0

    def may_end_early(self, num_arrived: int) -> bool:
        share = self._plan.preemptive_threshold
        return share is not None and num_arrived >= math.ceil(share * self._plan.num_rollouts)


class AsyncScheduler(Scheduler):
    """Async mode: each worker always has a request open, and what came here first goes first."""

    def next_slots(self, arrived: Sequence[RolloutRequest]) -> Iterator[WorkerSlot]:
        # Who has waited longest comes first: a bound on staleness may not leave room for all.
        for slot in self._longest_idle_first():
            if self._may_ask(slot) and not self._has_asked_for_all():
                yield slot

    def _may_ask(self, slot: WorkerSlot) -> bool:
        if slot.collecting or not slot.has_a_slab:
            return False
        # Not with the weights of long ago that a new process starts with.
        return bool(slot.num_requests) or self.is_up_to_date(slot.worker_id)

    def choose(self, arrived: Sequence[RolloutRequest]) -> RolloutRequest | None:
        """The first that is here, but none of a worker's before an older one of it."""
        passed_over: set[WorkerSlot] = set()
        for request in arrived:
            if request.rollout is not None and request.slot not in passed_over:
                return request
            passed_over.add(request.slot)
        return None


class BoundedStalenessScheduler(AsyncScheduler):
    """Async mode with a bound on staleness: as the :class:`~.schedule.Pacer` has it."""

    def __init__(
        self,
        plan: BatchPlan,
        slots: WorkerSlots,
        versions: SentVersions,
        acknowledged: Callable[[int], int],
        max_policy_lag: int,
    ) -> None:
        super().__init__(plan, slots, versions, acknowledged)
        self._pacer = Pacer(max_policy_lag, versions)

    def begin(self) -> None:
        self._pacer.awaited()

    def published(self) -> None:
        self._pacer.published()

    def _may_ask(self, slot: WorkerSlot) -> bool:
        return super()._may_ask(slot) and self._pacer.may_ask(
            slot.worker_id, self._acknowledged(slot.worker_id)
        )

    def choose(self, arrived: Sequence[RolloutRequest]) -> RolloutRequest | None:
        ticket = self._pacer.choose([request.ticket for request in arrived])
        return next((request for request in arrived if request.ticket is ticket), None)

    def choose_to_give(self, lie_there: Sequence[RolloutRequest]) -> RolloutRequest:
        return max(
            lie_there, key=lambda a: self._versions.lag(a.ticket.worker_id, a.ticket.version)
        )

    def _ticket(self, worker_id: int, acknowledged: int) -> StalenessTicket:
        return self._pacer.ask(worker_id, acknowledged)

    def arrived(self, ticket: StalenessTicket, version: int) -> None:
        self._pacer.arrived(ticket, version)

    def delivered(self, request: RolloutRequest) -> None:
        self._pacer.delivered(request.ticket)

    def given_up(self, request: RolloutRequest, *, is_wanted: bool) -> None:
        super().given_up(request, is_wanted=is_wanted)
        self._pacer.given_up(request.ticket)


class RoundRobinScheduler(Scheduler):
    """Async mode, the same each time: one rollout of each worker after the other."""

    _is_awaited = False

    def begin(self) -> None:
        self._is_awaited = True

    def end(self) -> None:
        self._is_awaited = False

    def next_slots(self, arrived: Sequence[RolloutRequest]) -> Iterator[WorkerSlot]:
        # Not before the user wants a batch: until then more weights may be published.
        if not self._is_awaited:
            return
        for slot in sorted(self._slots.staying(), key=_turn):
            if _is_idle(slot, arrived):
                if not self.is_up_to_date(slot.worker_id):
                    return  # or others would be asked before it, or not, as it happens
                if not self._has_asked_for_all():
                    yield slot

    def choose(self, arrived: Sequence[RolloutRequest]) -> RolloutRequest | None:
        """That of the worker whose turn it is, once all others that can be are at work."""
        in_line = self._slots.collecting()
        for request in arrived:
            if request.rollout is not None and request.slot not in in_line:
                return request  # of one that is gone, whose turn won't come any more
        if any(
            _is_idle(slot, arrived) and not self.is_up_to_date(slot.worker_id)
            for slot in self._slots.staying()
        ):
            return None
        if self._has_asked_for_all():  # who has nothing to give won't be asked for anything
            in_line = [slot for slot in in_line if not _is_idle(slot, arrived)]
        due = min(in_line, key=_turn, default=None)
        return next((request for request in arrived if request.slot is due), None)

    def delivered(self, request: RolloutRequest) -> None:
        request.slot.turn += 1


def make_scheduler(
    plan: BatchPlan,
    staleness: Staleness | None,
    slots: WorkerSlots,
    versions: SentVersions,
    acknowledged: Callable[[int], int],
) -> Scheduler:
    """The one that goes with a plan; its arguments as :class:`Scheduler` has them."""
    if plan.sync:
        return SyncScheduler(plan, slots, versions, acknowledged)
    if plan.in_turn:
        return RoundRobinScheduler(plan, slots, versions, acknowledged)
    if staleness is not None and staleness.mode == "pace":
        return BoundedStalenessScheduler(
            plan, slots, versions, acknowledged, staleness.max_policy_lag
        )
    return AsyncScheduler(plan, slots, versions, acknowledged)


def _turn(slot: WorkerSlot) -> tuple[int, int]:
    return slot.turn, slot.worker_id


def _is_idle(slot: WorkerSlot, arrived: Sequence[RolloutRequest]) -> bool:
    """Whether it has nothing to do, and nothing of it waits to be handed on."""
    return not slot.unsettled and not any(request.slot is slot for request in arrived)
