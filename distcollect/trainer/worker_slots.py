"""What the pool knows of its workers and of what it has asked them for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from distcollect.rollout.header import Rollout
from distcollect.trainer.staleness import StalenessTicket
from distcollect.transport.protocol import NUM_SLABS, Offer


@dataclass(frozen=True)
class BatchPlan:
    """What the pool gathers.

    Attributes:
        sync: whether batches are asked for with :meth:`~.pool.Pool.gather_all` or
            :meth:`~.pool.Pool.gather_next`.
        num_rollouts: in a sync batch.
        num_envs: n, rows of every rollout.
        num_steps: T of every rollout.
        random_frames: so many frames at the start have random actions (whole rollouts).
        num_frames: ask for no more frames than this; None: endless.
        waits_for_missing: in sync mode, a lost worker's share waits for who takes its place;
            otherwise the others collect it.
        preemptive_threshold: when this share of a sync batch's rollouts is there, the others are
            ended early; None: never.
        deadline_s: so long after it was asked for, too; None: never.
        reserved: workers that are never asked for any.
        first_env: the number of worker 0's first env among those of all trainers.
        in_turn: in async mode, one rollout of each worker after the other; asked for at the next
            batch, with the newest weights.
    """

    sync: bool
    num_rollouts: int
    num_envs: int
    num_steps: int
    random_frames: int = 0
    num_frames: int | None = None
    waits_for_missing: bool = False
    preemptive_threshold: float | None = None
    deadline_s: float | None = None
    reserved: frozenset[int] = frozenset()
    first_env: int = 0
    in_turn: bool = False

    @property
    def rollout_frames(self) -> int:
        """N * T."""
        return self.num_envs * self.num_steps


@dataclass(eq=False)
class WorkerSlot:
    """What the pool knows of a worker's process.

    Its n-th rollout lies in slab n modulo NUM_SLABS, so it may be asked for the next one as soon as
    the one before the last is settled, whatever has become of the last.

    Attributes:
        worker_id: its slot.
        incarnation: which process in it.
        peer: its id.
        pending_setup_calls: what it has to know before it may be asked.
        leaving: it is asked for nothing more.
        drained: so was said, once it owed nothing any more.
        gone: it will answer nothing more.
        collecting: a request is open.
        num_requests: rollouts asked for.
        unsettled: of these, the numbers of those whose slab is still to be read.
        open: what was asked of it and is neither here nor given up.
        batch: the last sync batch that it has a share in.
        last_asked: when, in requests of the pool.
        turn: how many it has delivered, where that goes in turn.
    """

    worker_id: int
    incarnation: int
    peer: int
    pending_setup_calls: int = 0
    leaving: bool = False
    drained: bool = False
    gone: bool = False
    collecting: bool = False
    num_requests: int = 0
    unsettled: set[int] = field(default_factory=set)
    open: set[RolloutRequest] = field(default_factory=set)
    batch: int = -1
    last_asked: int = 0
    turn: int = 0

    @property
    def has_a_slab(self) -> bool:
        """Whether there is memory for one more rollout."""
        return self.num_requests - min(self.unsettled, default=self.num_requests) < NUM_SLABS

    def settle(self, request: RolloutRequest) -> None:
        """This rollout is here, or given up: its slab may be written over."""
        self.unsettled.discard(request.number)
        self.open.discard(request)


@dataclass(eq=False)
class RolloutRequest:
    """A rollout that was asked for.

    Attributes:
        slot: whose it is.
        ticket: its lowest version as far as that is known.
        number: which of that process's rollouts.
        epoch: when it was asked for.
        asked_at: the same by the clock, in nanoseconds.
        offer: once it lies ready on its worker.
        fetching: it is on its way here.
        failed: it can't be fetched.
        rollout: once it is here.
        preempted: its worker was told to end it early.
        kept: its worker keeps it for another trainer; it counts as being fetched.
        referred: the user has its reference.
    """

    slot: WorkerSlot
    ticket: StalenessTicket
    number: int
    epoch: int
    asked_at: int
    offer: Offer | None = None
    fetching: bool = False
    failed: bool = False
    rollout: Rollout | None = None
    preempted: bool = False
    kept: bool = False
    referred: bool = False

    @property
    def lies_there(self) -> bool:
        """Whether it lies ready on its worker, and is not on its way here."""
        return not (self.offer is None or self.fetching or self.failed or self.rollout is not None)


class WorkerSlots:
    """Who is there, and whose place is to be taken again. Nothing here locks; the caller does.

    Attributes:
        coming: slots whose next process is on its way.
    """

    def __init__(self, reserved: frozenset[int] = frozenset()) -> None:
        """Nobody yet; those in the slots ``reserved`` don't collect."""
        self.coming: set[int] = set()
        self._set_aside = reserved
        self._taken: dict[int, WorkerSlot] = {}

    def __iter__(self) -> Iterator[WorkerSlot]:
        """All who are there."""
        return iter(self._taken.values())

    def get(self, worker_id: int) -> WorkerSlot | None:
        """Who is in this slot; None if nobody is."""
        return self._taken.get(worker_id)

    def find(self, worker_id: int, incarnation: int) -> WorkerSlot | None:
        """This process's, if it is there."""
        slot = self._taken.get(worker_id)
        return slot if slot is not None and slot.incarnation == incarnation else None

    def take(self, worker_id: int, incarnation: int, peer: int) -> WorkerSlot:
        """A process is there. Where it goes in turn it is as far as who has delivered least."""
        turn = min((other.turn for other in self.collecting()), default=0)
        self.coming.discard(worker_id)
        slot = self._taken[worker_id] = WorkerSlot(worker_id, incarnation, peer, turn=turn)
        return slot

    def vacate(self, worker_id: int, incarnation: int, *, replaced: bool) -> WorkerSlot | None:
        """A process is gone, ``replaced`` by one that is to come; its seat if it had one."""
        if replaced:
            self.coming.add(worker_id)
        else:
            self.coming.discard(worker_id)
        slot = self.find(worker_id, incarnation)
        if slot is not None:
            del self._taken[worker_id]
            slot.gone = True
        return slot

    @property
    def worker_ids(self) -> tuple[int, ...]:
        """The slots in order, with those whose next process is on its way."""
        return tuple(sorted(self._taken.keys() | self.coming))

    @property
    def num_coming(self) -> int:
        """How many of those on their way will collect."""
        return len(self.coming - self._set_aside)

    def collecting(self) -> list[WorkerSlot]:
        """Those who are there to collect."""
        reserved = self._set_aside
        return [slot for slot in self._taken.values() if slot.worker_id not in reserved]

    def staying(self) -> list[WorkerSlot]:
        """Of these, those that may be asked for more."""
        return [
            slot for slot in self.collecting() if not (slot.pending_setup_calls or slot.leaving)
        ]
