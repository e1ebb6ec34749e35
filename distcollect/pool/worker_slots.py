"""The pool's records of its workers, and of each rollout that it requested from them.

Pure: no clock, no thread, no socket.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from distcollect.errors import is_server
from distcollect.pool.staleness import StalenessTicket
from distcollect.rollout.header import Header, Rollout
from distcollect.rollout.layout import Tensors
from distcollect.transport.protocol import NUM_SLABS, CollectRequest, Offer

if TYPE_CHECKING:
    from distcollect.pool.setup_calls import SetupCall


@dataclass(frozen=True)
class BatchPlan:
    """Says what the pool collects.

    Attributes:
        sync: True: a batch has a rollout of every worker, collected for it; False: it is the next
            rollout of whichever worker.
        num_rollouts: rollouts in a sync batch.
        num_envs: n, rows of every rollout.
        num_steps: T of every rollout.
        random_frames: this many frames at the start have random actions (whole ones).
        num_frames: request no more frames than this; None: no limit.
        waits_for_missing: in sync mode, True: the share of a lost worker waits for its
            replacement; False: the other workers collect it.
        preemptive_threshold: when this share of a sync batch's rollouts has arrived, the workers
            that still collect for it are preempted; None: never.
        deadline_s: the same, this many seconds after the batch was requested; None: never.
        reserved: worker_ids of workers that collect no rollouts.
        first_env: number of worker 0's first env among the envs of all trainers.
        skew: see :class:`~.layout.Layout`.
        in_turn: in async mode, workers deliver one rollout each in a fixed order. A worker's next
            rollout is requested when the user asks for the next batch.
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
    skew: int = 1

    @property
    def rollout_frames(self) -> int:
        """Frames of a rollout: n * T."""
        return self.num_envs * self.num_steps


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


class SlotState(Enum):
    """Says what a worker's process may be asked for.

    Attributes:
        SETTING_UP: nothing yet: it has not answered all setup calls.
        SERVING: rollouts.
        LEAVING: nothing more; the trainer still takes the rollouts that it has.
        GONE: it answers nothing more.
    """

    SETTING_UP = "setting up"
    SERVING = "serving"
    LEAVING = "leaving"
    GONE = "gone"


class RolloutState(Enum):
    """Where a rollout that was requested is.

    Attributes:
        COLLECTING: its worker collects it.
        PREEMPTED: the same, and the worker was told to end it early.
        READY: it lies on its worker.
        FETCHING: it is on its way to the trainer. If that fails it is given up when its worker is
            lost.
        HERE: it is on the trainer.
        KEPT: its worker keeps it for another trainer, or was told to.
        UNWANTED: it is being collected or on its way to the trainer, but nobody will get it.
        DELIVERED: the user, or another trainer, has it.
        GIVEN_UP: nobody gets it.
    """

    COLLECTING = "collecting"
    PREEMPTED = "preempted"
    READY = "ready"
    FETCHING = "fetching"
    HERE = "here"
    KEPT = "kept"
    UNWANTED = "unwanted"
    DELIVERED = "delivered"
    GIVEN_UP = "given up"

    __hash__ = object.__hash__  # Enum's own takes four times as long


@dataclass(eq=False, slots=True)
class WorkerSlot:
    """The pool's record of a worker's process.

    Its n-th rollout lies in slab n modulo NUM_SLABS, so the next one may be requested as soon as
    the one before the last was read or given up, whatever has become of the last.

    Attributes:
        worker_id: its slot.
        incarnation: which process in that slot.
        peer: the process's id on the wire.
        is_reserved: it collects no rollouts.
        first_version: that it is sent first; before, it has the run's first weights.
        failed: it failed at what it was asked for, and is lost or will be.
        setup_call: the setup call that it has to answer.
        setup_calls: by method, those that it gets after that one, with their arguments.
        num_requests: rollouts requested from it.
        rollouts: of these, in their order, those that are neither delivered nor given up.
        last_request: number of its last request among those of the pool, from 1.
        turn: with ``in_turn``, how many rollouts it has delivered since the last seed.
    """

    worker_id: int
    incarnation: int
    peer: int
    is_reserved: bool = False
    first_version: int = 0
    failed: bool = False
    state: SlotState = SlotState.SETTING_UP
    setup_call: SetupCall | None = None
    setup_calls: dict[Callable[..., Any], tuple[SetupCall, Sequence[Any]]] = field(
        default_factory=dict
    )
    num_requests: int = 0
    rollouts: list[RolloutRequest] = field(default_factory=list)
    last_request: int = 0
    turn: int = 0

    @property
    def is_gone(self) -> bool:
        """Return True if its process answers nothing more."""
        return self.state is SlotState.GONE

    @property
    def is_staying(self) -> bool:
        """Return True if it is there and was not told to leave."""
        return self.state in (SlotState.SETTING_UP, SlotState.SERVING)

    @property
    def may_be_asked(self) -> bool:
        """Return True if rollouts may be requested from it at all."""
        return self.state is SlotState.SERVING and not (self.is_reserved or self.failed)

    @property
    def is_collecting(self) -> bool:
        """Return True if it works on a rollout, its last."""
        return bool(self.rollouts) and self.rollouts[-1].header is None

    @property
    def place(self) -> tuple[int, int]:
        """Return what orders the processes that deliver in turn."""
        return self.turn, self.worker_id

    @property
    def has_a_slab(self) -> bool:
        """Return True if there is memory for one more rollout."""
        oldest = self.num_requests - NUM_SLABS
        return all(r.number > oldest or r.state is RolloutState.HERE for r in self.rollouts)

    @property
    def owes_rollouts(self) -> bool:
        """Return True if it collects a rollout, or has one whose memory is still to be read."""
        return any(r.state is not RolloutState.HERE for r in self.rollouts)

    @property
    def oldest_waiting(self) -> RolloutRequest | None:
        """The first of its rollouts that wait for delivery; None: there is none."""
        return next((r for r in self.rollouts if r.state in WAITING), None)


@dataclass(eq=False, slots=True)
class RolloutRequest(StalenessTicket):
    """A rollout that was requested.

    Attributes:
        slot: the worker's process.
        number: which of that process's rollouts, counted from 0.
        wire_request: what is sent to the worker.
        asked_at: when its worker was asked to collect it, and later for its data; in nanoseconds.
        header: once the worker has collected it.
        offer: while it lies on its worker.
        tensors: while it is on the trainer and not the user's.
        arrival: how many rollouts arrived before it; -1 until it does.
        key: opens it for other trainers, if it is kept for them.
        held: by which another trainer's transport fetches it, see :meth:`.Transport.hand_over`.
        is_held: its worker has said that it keeps it.
        is_referred: the user has the reference to it.
    """

    slot: WorkerSlot
    number: int
    wire_request: CollectRequest
    asked_at: int = 0
    state: RolloutState = RolloutState.COLLECTING
    header: Header | None = None
    offer: Offer | None = None
    tensors: Tensors | None = None
    arrival: int = -1
    key: str = ""
    held: Any = None
    is_held: bool = False
    is_referred: bool = False

    def take_rollout(self) -> Rollout:
        """The rollout, for the user. Nothing here refers to its tensors any more."""
        tensors, self.tensors = self.tensors, None
        assert tensors is not None
        return Rollout(self.known_header, tensors)

    @property
    def known_header(self) -> Header:
        """Its header, which must have come."""
        assert self.header is not None
        return self.header


# The states of the rollouts that wait for delivery.
WAITING = (RolloutState.READY, RolloutState.FETCHING, RolloutState.HERE)


class WorkerSlots:
    """The worker processes that are there, and the slots that wait for a replacement.

    Attributes:
        coming: worker_ids whose next process is on its way.
        leaving: processes that were told to leave, and still owe something.
        idle: processes from which a rollout may be requested, in the order in which they became so.
        may_ask: decides that of a process.
        line: the processes that collect, or will.
    """

    def __init__(self, reserved: frozenset[int] = frozenset()) -> None:
        """Start empty; the workers ``reserved`` collect nothing."""
        self.coming: set[int] = set()
        self.leaving: set[WorkerSlot] = set()
        # Not a plain dict: finding the first key of that takes time when many were removed.
        self.idle: OrderedDict[WorkerSlot, None] = OrderedDict()
        self.may_ask: Callable[[WorkerSlot], bool] = lambda slot: slot.may_be_asked
        self.line: list[WorkerSlot] = []
        self._reserved = reserved
        self._present: dict[int, WorkerSlot] = {}

    def __iter__(self) -> Iterator[WorkerSlot]:
        """All processes that are there."""
        return iter(self._present.values())

    def get(self, worker_id: int) -> WorkerSlot | None:
        """The process in a slot; None if there is none."""
        return self._present.get(worker_id)

    def find(self, worker_id: int, incarnation: int) -> WorkerSlot | None:
        """This very process; None if it is not there."""
        slot = self._present.get(worker_id)
        return slot if slot is not None and slot.incarnation == incarnation else None

    def add(self, worker_id: int, incarnation: int, peer: int, newest: int = 0) -> WorkerSlot:
        """A process has joined, and is sent version ``newest``."""
        self.coming.discard(worker_id)
        is_reserved = self.is_reserved(worker_id)
        slot = WorkerSlot(worker_id, incarnation, peer, is_reserved, newest)
        self._present[worker_id] = slot
        if not is_reserved:
            # It starts level with the worker that has delivered least.
            slot.turn = min((other.turn for other in self.line), default=0)
            self.line.append(slot)
        return slot

    def remove(self, worker_id: int, incarnation: int, *, replaced: bool) -> WorkerSlot | None:
        """A process is gone; ``replaced``: another one is on its way. None if it wasn't there."""
        if replaced:
            self.coming.add(worker_id)
        else:
            self.coming.discard(worker_id)
        slot = self.find(worker_id, incarnation)
        if slot is not None:
            del self._present[worker_id]
            if not slot.is_reserved:
                self.line.remove(slot)
            self.become(slot, SlotState.GONE)
        return slot

    def become(self, slot: WorkerSlot, state: SlotState) -> None:
        """Change a process's state."""
        slot.state = state
        if state is SlotState.LEAVING:
            self.leaving.add(slot)
        else:
            self.leaving.discard(slot)
        self.refresh(slot)

    def refresh(self, slot: WorkerSlot) -> None:
        """Look again whether a process is idle: something changed that may decide it."""
        if self.may_ask(slot):
            self.idle[slot] = None
        else:
            self.idle.pop(slot, None)

    @property
    def worker_ids(self) -> tuple[int, ...]:
        """The slots in order, with those whose next process is on its way."""
        return tuple(sorted(self._present.keys() | self.coming))

    @property
    def num_coming(self) -> int:
        """The number of processes on their way that will collect."""
        return sum(not self.is_reserved(worker_id) for worker_id in self.coming)

    def is_reserved(self, worker_id: int) -> bool:
        """Return True if the processes of a slot collect no rollouts."""
        return is_server(worker_id) or worker_id in self._reserved

    @property
    def some_collect_or_will(self) -> bool:
        """Return True if there is a process that collects and stays, or one is on its way."""
        return self.num_coming > 0 or any(slot.is_staying for slot in self.line)
