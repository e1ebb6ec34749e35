"""Which worker is asked next in sync mode. Pure: no clock, no thread, no socket."""

from __future__ import annotations

import math

from distcollect.pool.queues import SlotQueue, by_last_request
from distcollect.pool.scheduler import Scheduler
from distcollect.pool.staleness import SentVersions
from distcollect.pool.worker_slots import (
    BatchPlan,
    RolloutRequest,
    WorkerSlot,
    WorkerSlots,
)


class SyncScheduler(Scheduler):
    """Sync mode: one rollout of every worker, all for the same batch."""

    def __init__(self, plan: BatchPlan, slots: WorkerSlots, versions: SentVersions) -> None:
        super().__init__(plan, slots, versions)
        if plan.preemptive_threshold is not None:
            share = math.ceil(plan.preemptive_threshold * plan.num_rollouts)
            self.enough_to_end_early = max(1, share)
        self._batch = 0
        self._num_wanted = 0  # rollouts of this batch that were not requested yet
        self._without_share: set[WorkerSlot] = set()  # workers that are to have one, and stay
        # Slots that may be asked now. Not in the order in which they became idle: that which gets
        # new weights last would be last. Those that have a share of this batch come after all that
        # have none, as they were asked later.
        self._idle = SlotQueue(by_last_request)

    def begin(self) -> None:
        self._batch += 1
        self._num_wanted = self._plan.num_rollouts
        self.ends_early = False
        self._without_share = {slot for slot in self._slots.able if slot.is_staying}

    def joined(self, slot: WorkerSlot) -> None:
        if not slot.is_reserved:
            self._without_share.add(slot)
        super().joined(slot)

    def leaves(self, slot: WorkerSlot) -> None:
        self._without_share.discard(slot)
        super().leaves(slot)

    def refresh(self, slot: WorkerSlot) -> None:
        self._idle.put(
            slot, present=not slot.unsettled and slot.is_up_to_date and slot.may_be_asked
        )

    def next_slot(self) -> WorkerSlot | None:
        if self._num_wanted <= 0:
            return None
        slot = self._idle.first()
        if slot is None or slot.batch != self._batch:
            return slot
        # A worker gets a second share only if there is no other worker for it.
        others = len(self._without_share)
        coming = self._slots.num_coming if self._plan.waits_for_missing else 0
        return slot if self._num_wanted > others + coming else None

    def requested(self, request: RolloutRequest) -> None:
        super().requested(request)
        request.slot.batch = self._batch
        self._num_wanted -= 1
        self._without_share.discard(request.slot)

    def given_up(self, request: RolloutRequest, *, is_wanted: bool) -> None:
        super().given_up(request, is_wanted=is_wanted)
        if is_wanted:
            self._num_wanted += 1

    def given_up_all(self) -> None:
        self._num_wanted = 0
