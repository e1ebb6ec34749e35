"""Decides which worker is asked next, and which rollout is delivered next, in each mode.

Pure: no clock, no thread, no socket. A scheduler is told nothing: it answers from the state of the
workers and of the rollouts.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, islice, takewhile
from operator import attrgetter

from distcollect.pool.requests import Requests
from distcollect.pool.staleness import Pacer
from distcollect.pool.worker_slots import RolloutRequest, RolloutState, WorkerSlot

# Workers that have never been asked come by their number: the same seed gives the same frames,
# whichever of them joined first.
_LAST_REQUEST = attrgetter("last_request", "worker_id")


class Scheduler:
    """Async mode: workers collect all the time; first come, first served.

    They begin when the user asks for the first batch: what they collected before would be given up
    if the user set a seed. With W workers, at most W + min(W, 2) rollouts are being collected or
    wait for delivery: else frames would get older than that while the trainer is slow. Before the
    user asks for the second batch, at most W.
    """

    # While all workers collect, up to this many rollouts wait for the trainer: one is fetched while
    # the user works on another.
    _READY_AHEAD = 2

    def __init__(self, requests: Requests) -> None:
        """Schedule what comes next after ``requests``."""
        self._requests = requests
        self._plan, self._slots = requests.plan, requests.slots
        self._versions = requests.versions

    def may_ask(self, slot: WorkerSlot) -> bool:
        """Return True if a rollout may be requested from this worker, if there is room for it."""
        return self._is_free(slot) and self._may_act(slot)

    def _is_free(self, slot: WorkerSlot) -> bool:
        return slot.may_be_asked and not slot.is_collecting and slot.has_a_slab

    def _may_act(self, slot: WorkerSlot) -> bool:
        # A new process starts with the run's first weights: it is to have the newest ones first.
        return bool(slot.num_requests) or self._versions.is_up_to_date(slot.worker_id)

    def next_workers(self, *, is_awaited: bool) -> Iterable[WorkerSlot]:
        """The workers to request a rollout from now, which is to be done while they come.

        ``is_awaited``: the user waits for a batch.
        """
        return list(islice(self._slots.idle, self._room())) if self._slots.idle else ()

    def _room(self) -> int:
        """Return how many further rollouts may be requested, from whichever workers."""
        requests, room = self._requests, len(self._slots.line)
        if not requests.num_batches:
            return 0
        # Many users publish once they have the first batch: no more is collected before than is
        # needed to keep all workers busy.
        if requests.num_batches > 1:
            room += min(room, self._READY_AHEAD)
        room -= requests.num_open - len(requests.among[RolloutState.KEPT])
        return min(room, requests.num_left) if room > 0 else 0

    def next_rollout(self) -> RolloutRequest | None:
        """The rollout to deliver next, on the trainer or not; None if it has yet to arrive.

        The first rollout on the trainer, but none before an older one of the same worker.
        """
        here = self._requests.among[RolloutState.HERE]
        return self.first_of(r for r in here if r.slot.oldest_waiting is r)

    def first_of(self, candidates: Iterable[RolloutRequest]) -> RolloutRequest | None:
        """The one to deliver first of these rollouts; None if there are none."""
        return min(candidates, key=lambda request: request.arrival, default=None)


class SyncScheduler(Scheduler):
    """Sync mode: one rollout of every worker, all for the same batch."""

    def may_ask(self, slot: WorkerSlot) -> bool:
        """Return True if this worker may be asked for its first share of the batch."""
        return slot.last_request <= self._requests.before_batch and self._may_collect(slot)

    def _may_collect(self, slot: WorkerSlot) -> bool:
        return (
            slot.may_be_asked
            and not slot.owes_rollouts
            and self._versions.is_up_to_date(slot.worker_id)
        )

    def next_workers(self, *, is_awaited: bool) -> Iterable[WorkerSlot]:
        requests = self._requests
        if not is_awaited:
            return ()
        unwanted = len(requests.among[RolloutState.UNWANTED])
        missing = self._plan.num_rollouts - (requests.num_open - unwanted)
        if missing <= 0:
            return ()
        # Not in the order in which they became idle: that which gets new weights last would be
        # last. Who has waited longest comes first.
        idle = sorted(self._slots.idle, key=_LAST_REQUEST)[:missing]
        coming = self._slots.num_coming if self._plan.waits_for_missing else 0
        if missing <= len(idle) + coming:
            return idle
        # A worker gets a second share only if there is no other worker for it.
        others = coming
        second: list[WorkerSlot] = []
        for slot in self._slots.line:
            if slot.last_request <= requests.before_batch:
                others += slot.is_staying
            elif self._may_collect(slot):
                second.append(slot)
        return idle + sorted(second, key=_LAST_REQUEST)[: max(0, missing - others)]


class PacedScheduler(Scheduler):
    """Async mode with a bound on staleness, see :class:`~.staleness.Pacer`."""

    def __init__(self, requests: Requests, pacer: Pacer) -> None:
        super().__init__(requests)
        self._pacer = pacer
        self._waits_since: int | None = None  # since this version, for a worker to get its weights

    def may_ask(self, slot: WorkerSlot) -> bool:
        return self._is_free(slot)  # one that waits for its weights keeps its place

    def next_workers(self, *, is_awaited: bool) -> Iterable[WorkerSlot]:
        """Those that have been idle for longest, and whose weights are new enough.

        If the weights of one of them are on their way, it is waited for: else the workers that get
        theirs first would do all the work. But no longer than until the publication after that.
        """
        while self._slots.idle and self._room() and (slot := self._next_worker()):
            yield slot

    def _next_worker(self) -> WorkerSlot | None:
        needed, newest = self._pacer.needed_slack(), self._versions.newest_of_all
        if needed > self._pacer.max_slack:
            return None  # no worker has that
        for slot in self._slots.idle:
            worker_id, version = slot.worker_id, self._versions.acknowledged(slot.worker_id)
            if self._may_act(slot) and self._pacer.slack(worker_id, version) >= needed:
                self._waits_since = None
                return slot
            if self._versions.is_coming(worker_id):
                self._waits_since = newest if self._waits_since is None else self._waits_since
                if newest <= self._waits_since + 1:
                    return None
        return None

    def next_rollout(self) -> RolloutRequest | None:
        among = self._requests.among
        states = RolloutState.HERE, RolloutState.FETCHING, RolloutState.READY
        waiting = chain(*[among[state] for state in states])
        # None before an older one of the same worker, whose slack is never higher.
        first = self.first_of(r for r in waiting if r.slot.oldest_waiting is r)
        return first if first is not None and self._pacer.may_deliver(first) else None

    def first_of(self, candidates: Iterable[RolloutRequest]) -> RolloutRequest | None:
        """The first with the least slack, without those that are too stale."""
        lowest, first, least = self._pacer.lowest_slack, None, 1 << 60
        for request in candidates:
            slack = self._pacer.slack(request.worker_id, request.version)
            if slack == lowest:
                return request
            if 0 <= slack < least:
                first, least = request, slack
        return first


class InTurnScheduler(Scheduler):
    """Async mode, the same each time: one rollout of each worker after the other."""

    def may_ask(self, slot: WorkerSlot) -> bool:
        return slot.may_be_asked and not slot.rollouts

    def next_workers(self, *, is_awaited: bool) -> Iterable[WorkerSlot]:
        # Not before the user wants a batch: until then more weights may be published.
        if not is_awaited:
            return ()
        idle = sorted(self._slots.idle, key=attrgetter("place"))
        # If one were asked before another that waits for its weights, the order would depend on
        # when these arrive.
        ready = takewhile(lambda slot: self._versions.is_up_to_date(slot.worker_id), idle)
        return list(islice(ready, self._requests.num_left))

    def next_rollout(self) -> RolloutRequest | None:
        """That of the worker whose turn it is, once all others that can be are at work."""
        here = self._requests.among[RolloutState.HERE]
        if left_behind := self.first_of(r for r in here if r.slot.is_gone):
            return left_behind  # its worker has no turn any more
        if not all(self._versions.is_up_to_date(slot.worker_id) for slot in self._slots.idle):
            return None
        # If all is requested, a worker that has nothing to deliver won't have.
        needs_work = not self._requests.num_left
        line = (slot for slot in self._slots.line if slot.rollouts or not needs_work)
        first = min(line, key=attrgetter("place"), default=None)
        return None if first is None else first.oldest_waiting


def scheduler_for(requests: Requests, pacer: Pacer | None) -> Scheduler:
    """Return the scheduler of the mode that the plan says; ``pacer``: bounds staleness, if any."""
    if pacer is not None:
        return PacedScheduler(requests, pacer)
    if requests.plan.sync:
        return SyncScheduler(requests)
    return InTurnScheduler(requests) if requests.plan.in_turn else Scheduler(requests)
