"""The pool's decisions by themselves: a test says which event comes, and sees the commands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from distcollect.config import Staleness
from distcollect.pool.pool_commands import PoolCommands, Wanted
from distcollect.pool.pool_core import PoolCore
from distcollect.pool.worker_slots import BatchPlan, RolloutRequest, WorkerSlot
from distcollect.rollout.header import Header
from distcollect.transport.protocol import Offer

FRAMES = 4
SYNC = BatchPlan(sync=True, num_rollouts=2, num_envs=1, num_steps=FRAMES)


class ReadyRollout:
    """A rollout that is ready on its worker."""

    def __init__(self, request: RolloutRequest, version: int) -> None:
        key = (request.slot.worker_id, request.slot.incarnation, request.number)
        stepped = (request.number + 1) * FRAMES
        self.header = Header(*key, FRAMES, FRAMES, 0, (version, version), stepped=stepped)
        self.request = request
        self.declined = False

    def fetch(self, deliver: Any) -> Any:
        raise AssertionError("the test says when it arrives")

    def decline(self) -> None:
        self.declined = True


class Play(PoolCommands):
    """A pool's core, and workers that do nothing by themselves.

    Attributes:
        asked: worker_ids of the requests since they were taken last.
        open: the requests that were not answered.
        fetching: the rollouts that are on their way.
        delivered: worker_ids of each batch.
        preempted: worker_ids of the requests that are to end early.
        called: setup calls: worker_id, name of the method, arguments.
        drained: worker_id and incarnation of those that left.
    """

    def __init__(
        self, plan: BatchPlan, num_workers: int, *, staleness: Staleness | None = None
    ) -> None:
        self.has: dict[int, int] = {}  # worker_id to the version that it has
        self.core = PoolCore(plan, staleness, self, lambda: "", lambda w: self.has.get(w, 0))
        self.asked: list[int] = []
        self.open: list[RolloutRequest] = []
        self.fetching: list[RolloutRequest] = []
        self.delivered: list[list[int]] = []
        self.preempted: list[int] = []
        self.called: list[tuple[Any, ...]] = []
        self.drained: list[tuple[int, int]] = []
        self.slot_of: dict[int, WorkerSlot] = {}
        self.wanted = Wanted.ALL if plan.sync else Wanted.NEXT
        for worker_id in range(num_workers):
            self.join(worker_id)

    # Commands are noted; nothing comes of them until the test says so.

    def collect(self, request: RolloutRequest) -> None:
        self.open.append(request)
        self.asked.append(request.worker_id)

    def fetch(self, request: RolloutRequest, offer: Offer) -> None:
        self.fetching.append(request)

    def deliver(self, wanted: Wanted, requests: Sequence[RolloutRequest]) -> None:
        self.delivered.append([request.worker_id for request in requests])

    def preempt(self, request: RolloutRequest) -> None:
        self.preempted.append(request.worker_id)

    def set_up(self, slot: WorkerSlot, method: Callable[..., Any], args: Sequence[Any]) -> None:
        self.slot_of[slot.worker_id] = slot
        self.called.append((slot.worker_id, method.__name__, *args))

    def report_drained(self, slot: WorkerSlot) -> None:
        self.drained.append((slot.worker_id, slot.incarnation))

    def take(self, noted: list[Any]) -> list[Any]:
        """What one of the lists has, which is empty then."""
        taken = noted.copy()
        noted.clear()
        return taken

    def take_asked(self) -> list[int]:
        """The workers that were asked since."""
        return self.take(self.asked)

    # Events.

    def want(self) -> list[int] | None:
        """The user asks for a batch; whose rollouts it gets, if they are there."""
        self.core.batch_wanted(self.wanted)
        return self.delivered.pop() if self.delivered else None

    def join(self, worker_id: int, incarnation: int = 0) -> None:
        self.core.worker_joined(worker_id, incarnation, 10 * worker_id + incarnation, 0)

    def lose(self, worker_id: int, *, replaced: bool) -> None:
        self.open = [request for request in self.open if request.worker_id != worker_id]
        self.core.worker_lost(worker_id, 0, replaced=replaced)

    def leave(self, worker_id: int) -> None:
        self.core.worker_leaving(worker_id, 0)

    def publish(self, version: int, worker_ids: list[int]) -> None:
        self.core.published(version, worker_ids)

    def acknowledge(self, worker_id: int, version: int) -> None:
        self.has[worker_id] = version
        self.core.acknowledged(worker_id)

    def finish(self, worker_id: int, version: int = 0) -> ReadyRollout:
        """A worker's oldest rollout lies on it."""
        request = next(request for request in self.open if request.worker_id == worker_id)
        self.open.remove(request)
        ready = ReadyRollout(request, version)
        offer: Offer = ready  # type: ignore[assignment]
        self.core.offered(request, offer, 1)
        return ready

    def arrive(self) -> None:
        """All that is on its way arrives."""
        while self.fetching:
            self.core.fetched(self.fetching.pop(0), [])

    def come(self, worker_id: int, version: int = 0) -> ReadyRollout:
        """A worker's oldest rollout lies on it, and arrives if it is fetched."""
        ready = self.finish(worker_id, version)
        self.arrive()
        return ready
