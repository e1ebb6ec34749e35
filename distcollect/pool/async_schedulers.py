"""Which worker is asked next, and which rollout is delivered next, in the modes that are async.

Pure: no clock, no thread, no socket.
"""

from __future__ import annotations

from collections.abc import Sequence

from distcollect.pool.queues import (
    RequestQueue,
    SlotLine,
    SlotQueue,
    by_last_request,
    by_turn,
)
from distcollect.pool.scheduler import Scheduler
from distcollect.pool.staleness import Pacer, SentVersions
from distcollect.pool.worker_slots import (
    BatchPlan,
    RolloutRequest,
    RolloutState,
    WorkerSlot,
    WorkerSlots,
)


def _by_arrival(request: RolloutRequest) -> tuple[int, int]:
    return request.arrival, 0


# While all workers collect, up to this many rollouts wait for the trainer: one is fetched while the
# user works on another.
_READY_AHEAD = 2


class AsyncScheduler(Scheduler):
    """Async mode: workers collect all the time; first come, first served.

    They begin when the user asks for the first batch: what they collected before would be given up
    if the user set a seed. With W workers, at most W + min(W, 2) rollouts are being collected or
    wait for delivery: else frames would get older than that while the trainer is slow. Before the
    user asks for the second batch, at most W.
    """

    def __init__(self, plan: BatchPlan, slots: WorkerSlots, versions: SentVersions) -> None:
        super().__init__(plan, slots, versions)
        self._num_begun = 0  # batches that the user has asked for
        self._num_waiting = 0  # rollouts that arrived and were not delivered
        self._idle = SlotLine()  # those that may be asked
        self._deliverable = RequestQueue(_by_arrival, _is_here_and_oldest)

    def refresh(self, slot: WorkerSlot) -> None:
        self._idle.put(slot, present=self._may_ask(slot))

    def _may_ask(self, slot: WorkerSlot) -> bool:
        if slot.collecting is not None or not slot.may_be_asked or not slot.has_a_slab:
            return False
        # A new process starts with the run's first weights: it is to have the newest ones first.
        return bool(slot.num_requests) or slot.is_up_to_date

    def begin(self) -> None:
        self._num_begun += 1

    def _may_request(self) -> bool:
        """Whether a further rollout may be requested, from whichever worker."""
        num_able = self._slots.num_able
        num_ahead = self._slots.num_collecting + self._num_waiting
        # Many users publish once they have the first batch: no more is collected before than is
        # needed to keep all workers busy.
        ready_ahead = min(num_able, _READY_AHEAD) if self._num_begun > 1 else 0
        has_room = num_ahead < num_able + ready_ahead
        return bool(self._num_begun) and has_room and not self._has_asked_for_all()

    def next_slot(self) -> WorkerSlot | None:
        slot = self._idle.first()
        return slot if slot is not None and self._may_request() else None

    def arrived(self, request: RolloutRequest) -> None:
        self._num_waiting += 1
        self.refresh(request.slot)

    def fetched(self, request: RolloutRequest) -> None:
        self._note_oldest(request.slot)

    def removed(self, request: RolloutRequest) -> None:
        self._num_waiting -= 1
        self._note_oldest(request.slot)

    def _note_oldest(self, slot: WorkerSlot) -> None:
        if slot.arrived and slot.arrived[0].state is RolloutState.HERE:
            self._deliverable.put(slot.arrived[0])

    def choose(self) -> RolloutRequest | None:
        """The first rollout on the trainer, but none before an older one of the same worker."""
        return self._deliverable.first()


def _is_here_and_oldest(request: RolloutRequest) -> bool:
    return request.state is RolloutState.HERE and request.slot.arrived[:1] == [request]


def _is_here(request: RolloutRequest) -> bool:
    return request.state is RolloutState.HERE


class BoundedStalenessScheduler(AsyncScheduler):
    """Async mode with a bound on staleness, see :class:`~.staleness.Pacer`."""

    def __init__(
        self, plan: BatchPlan, slots: WorkerSlots, versions: SentVersions, max_policy_lag: int
    ) -> None:
        super().__init__(plan, slots, versions)
        self._pacer = Pacer(max_policy_lag, versions)
        self._idle_by_slack: dict[int, SlotQueue] = {}
        self._slacks: dict[WorkerSlot, int] = {}  # of the slots in these queues
        self._arrived = RequestQueue(self._by_slack, self._is_fresh)
        self._ready = RequestQueue(
            self._by_slack,
            lambda request: request.state is RolloutState.READY and self._is_fresh(request),
        )
        self._revision = 0  # of the versions by which these two are sorted

    def _by_slack(self, request: RolloutRequest) -> tuple[int, int]:
        return self._pacer.slack(request.worker_id, request.version), request.arrival

    def _is_fresh(self, request: RolloutRequest) -> bool:
        return request in request.slot.arrived and not self._pacer.too_stale(request)

    def _sort(self) -> None:
        if self._revision != self._versions.revision:
            self._revision = self._versions.revision
            self._arrived.sort_again()
            self._ready.sort_again()

    def begin(self) -> None:
        super().begin()
        self._pacer.awaited()

    def published(self) -> None:
        self._pacer.published()

    def refresh(self, slot: WorkerSlot) -> None:
        slack = -1
        if self._may_ask(slot):
            slack = self._pacer.slack(slot.worker_id, slot.acknowledged)
        before = self._slacks.get(slot, -1)
        if before >= 0 and before != slack:
            del self._slacks[slot]
            queue = self._idle_by_slack[before]
            queue.put(slot, present=False)
            if not queue:
                del self._idle_by_slack[before]
        if slack >= 0:
            self._slacks[slot] = slack
            if slack not in self._idle_by_slack:
                self._idle_by_slack[slack] = SlotQueue(by_last_request)
            self._idle_by_slack[slack].put(slot)

    def next_slot(self) -> WorkerSlot | None:
        if not self._idle_by_slack or not self._may_request():
            return None
        needed = self._pacer.needed_slack()
        # The worker that has waited longest comes first: there may not be room for all.
        found: WorkerSlot | None = None
        for slack, queue in self._idle_by_slack.items():
            slot = queue.first() if slack >= needed else None
            if slot and (found is None or by_last_request(slot) < by_last_request(found)):
                found = slot
        return found

    def choose(self) -> RolloutRequest | None:
        self._sort()
        request = self._arrived.first()
        return request if request is not None and self._pacer.may_deliver(request) else None

    def choose_to_refer(self) -> RolloutRequest | None:
        self._sort()
        return self._ready.first()

    def choose_among(self, here: Sequence[RolloutRequest]) -> RolloutRequest:
        return min(here, key=self._by_slack)

    def requested(self, request: RolloutRequest) -> None:
        super().requested(request)
        self._pacer.ask(request)

    def offered(self, request: RolloutRequest, version: int) -> None:
        self._pacer.arrived(request, version)

    def arrived(self, request: RolloutRequest) -> None:
        super().arrived(request)
        self._arrived.put(request)
        self._ready.put(request)

    def _note_oldest(self, slot: WorkerSlot) -> None:
        pass

    def delivered(self, request: RolloutRequest) -> None:
        self._pacer.delivered(request)

    def given_up(self, request: RolloutRequest, *, is_wanted: bool) -> None:
        super().given_up(request, is_wanted=is_wanted)
        self._pacer.given_up(request)


class RoundRobinScheduler(Scheduler):
    """Async mode, the same each time: one rollout of each worker after the other."""

    def __init__(self, plan: BatchPlan, slots: WorkerSlots, versions: SentVersions) -> None:
        super().__init__(plan, slots, versions)
        self._is_awaited = False
        self._in_line = SlotQueue(by_turn)  # all that collect
        self._at_work = SlotQueue(by_turn)  # of these, those that are not idle
        self._idle = SlotQueue(by_turn)  # those that may be asked
        self._idle_behind: set[WorkerSlot] = set()  # of these, those that wait for weights
        self._left_behind = RequestQueue(_by_arrival, _is_here)  # of processes that are gone

    def begin(self) -> None:
        self._is_awaited = True

    def end(self) -> None:
        self._is_awaited = False

    def joined(self, slot: WorkerSlot) -> None:
        # It starts level with the worker that has delivered least.
        first = self._in_line.first()
        slot.turn = 0 if first is None else first.turn
        self._line_up(slot)
        super().joined(slot)

    def leaves(self, slot: WorkerSlot) -> None:
        if slot.is_gone:
            for request in slot.arrived:
                self.fetched(request)
        self._line_up(slot)
        super().leaves(slot)

    def _line_up(self, slot: WorkerSlot) -> None:
        self._in_line.put(slot, present=not (slot.is_reserved or slot.is_gone))

    def refresh(self, slot: WorkerSlot) -> None:
        is_idle = slot.is_idle
        self._at_work.put(slot, present=not is_idle and slot in self._in_line)
        is_idle = is_idle and slot.may_be_asked
        self._idle.put(slot, present=is_idle)
        if is_idle and not slot.is_up_to_date:
            self._idle_behind.add(slot)
        else:
            self._idle_behind.discard(slot)

    def next_slot(self) -> WorkerSlot | None:
        # Not before the user wants a batch: until then more weights may be published.
        if not self._is_awaited or self._has_asked_for_all():
            return None
        slot = self._idle.first()
        # If others were asked before it, the order would depend on when its weights arrive.
        return slot if slot is not None and slot.is_up_to_date else None

    def fetched(self, request: RolloutRequest) -> None:
        if request.slot.is_gone and request.state is RolloutState.HERE:
            self._left_behind.put(request)

    def choose(self) -> RolloutRequest | None:
        """That of the worker whose turn it is, once all others that can be are at work."""
        request = self._left_behind.first()
        if request is not None:
            return request  # its worker has no turn any more
        if self._idle_behind:
            return None
        # If all is requested, a worker that has nothing to deliver won't have.
        line = self._at_work if self._has_asked_for_all() else self._in_line
        slot = line.first()
        return slot.arrived[0] if slot is not None and slot.arrived else None

    def delivered(self, request: RolloutRequest) -> None:
        request.slot.turn += 1
        if not request.slot.is_gone:
            self._line_up(request.slot)
            self.refresh(request.slot)
