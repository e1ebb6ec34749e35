"""Which worker is asked next, and which rollout is delivered next: what all modes have in common.

Pure: no clock, no thread, no socket. Nothing looks at all workers, but for the start of a sync
batch: whoever changes a slot calls :meth:`Scheduler.refresh` for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from distcollect.pool.staleness import SentVersions
from distcollect.pool.worker_slots import (
    BatchPlan,
    RolloutRequest,
    WorkerSlot,
    WorkerSlots,
)


class Scheduler:
    """What all modes have in common. An event that means nothing to a mode does nothing there.

    Attributes:
        frames_asked: frames of the rollouts that were requested, without those given up.
        ends_early: workers that collect for this batch are to deliver what they have.
        enough_to_end_early: when so many of a batch's rollouts have arrived, the others are
            preempted; None: never.
    """

    def __init__(self, plan: BatchPlan, slots: WorkerSlots, versions: SentVersions) -> None:
        """Schedule what ``plan`` says.

        Args:
            plan: what is to be collected.
            slots: the workers.
            versions: which weights were sent to them.
        """
        self.frames_asked = 0
        self.ends_early = False
        self.enough_to_end_early: int | None = None
        self._plan = plan
        self._slots = slots
        self._versions = versions
        self._num_requests = 0

    def next_slot(self) -> WorkerSlot | None:
        """The worker to request a rollout from now; None if there is none."""
        raise NotImplementedError

    def choose(self) -> RolloutRequest | None:
        """The rollout to deliver next, on the trainer or not; None if it has yet to arrive."""
        raise NotImplementedError("a sync batch is delivered as a whole")

    def choose_to_refer(self) -> RolloutRequest | None:
        """The one to hand over to another trainer; None: the first that lies on its worker."""
        return None

    def choose_among(self, here: Sequence[RolloutRequest]) -> RolloutRequest:
        """The one to hand over to another trainer, of rollouts that were fetched before."""
        return here[0]

    # Events.

    def refresh(self, slot: WorkerSlot) -> None:
        """Something changed that decides whether a rollout may be requested from this slot.

        It is called for all changes but these, of which there is an event of their own: a rollout
        arrived, or was delivered.
        """

    def joined(self, slot: WorkerSlot) -> None:
        """A process is in a slot."""
        self.refresh(slot)

    def leaves(self, slot: WorkerSlot) -> None:
        """A process is to leave, or is gone."""
        self.refresh(slot)

    def begin(self) -> None:
        """The user waits for a batch."""

    def end(self) -> None:
        """The user has it, or waits no longer."""

    def published(self) -> None:
        """New weights are on their way; call it after :meth:`SentVersions.publish`."""

    def requested(self, request: RolloutRequest) -> None:
        """A rollout is requested from a worker."""
        self.frames_asked += self._plan.rollout_frames
        self._num_requests += 1
        request.slot.last_request = self._num_requests

    def offered(self, request: RolloutRequest, version: int) -> None:
        """A rollout lies on its worker, and no frame of it has a version below this."""
        request.version = version

    def arrived(self, request: RolloutRequest) -> None:
        """A rollout lies on its worker and waits for delivery."""

    def fetched(self, request: RolloutRequest) -> None:
        """A rollout that waits for delivery is on the trainer."""

    def removed(self, request: RolloutRequest) -> None:
        """A rollout waits for delivery no longer."""

    def delivered(self, request: RolloutRequest) -> None:
        """The user, or another trainer, gets a rollout."""

    def given_up(self, request: RolloutRequest, *, is_wanted: bool) -> None:
        """Nobody gets a rollout; ``is_wanted``: another one is to be collected instead."""
        self.frames_asked -= self._plan.rollout_frames

    def taken_back(self) -> None:
        """A rollout that was delivered did not reach the user: another one is to be collected."""
        self.frames_asked -= self._plan.rollout_frames

    def given_up_all(self) -> None:
        """Nothing that was requested until now is wanted any more."""

    def _has_asked_for_all(self) -> bool:
        limit = self._plan.num_frames
        return limit is not None and self.frames_asked >= limit
