"""What the pool knows of its workers, and of each rollout that it requested from them.

Pure: no clock, no thread, no socket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from distcollect.pool.staleness import SentVersions, StalenessTicket
from distcollect.rollout.header import Header, Rollout
from distcollect.rollout.layout import Tensors
from distcollect.transport.protocol import NUM_SLABS, CollectRequest, Offer

if TYPE_CHECKING:
    from distcollect.pool.setup_calls import SetupCall


@dataclass(frozen=True)
class BatchPlan:
    """What the pool collects.

    Attributes:
        sync: True: a batch has a rollout of every worker, collected for it; False: it is the next
            rollout of whichever worker.
        num_rollouts: rollouts in a sync batch.
        num_envs: n, rows of every rollout.
        num_steps: T of every rollout.
        random_frames: this many frames at the start have random actions (whole rollouts).
        num_frames: request no more frames than this; None: no limit.
        waits_for_missing: in sync mode, True: the share of a lost worker waits for its
            replacement; False: the other workers collect it.
        preemptive_threshold: when this share of a sync batch's rollouts has arrived, the workers
            that still collect for it are preempted; None: never.
        deadline_s: the same, this many seconds after the batch was requested; None: never.
        reserved: worker_ids of workers that collect no rollouts.
        first_env: number of worker 0's first env among the envs of all trainers.
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

    @property
    def rollout_frames(self) -> int:
        """Frames of a rollout: n * T."""
        return self.num_envs * self.num_steps


class SlotState(Enum):
    """What a worker's process may be asked for.

    Attributes:
        SETTING_UP: nothing yet: it has not answered all setup calls.
        SERVING: rollouts.
        LEAVING: nothing more; the trainer still takes the rollouts that it has.
        DRAINED: nothing more; the trainer has taken all its rollouts and has said so.
        GONE: it answers nothing more.
    """

    SETTING_UP = "setting up"
    SERVING = "serving"
    LEAVING = "leaving"
    DRAINED = "drained"
    GONE = "gone"


class RolloutState(Enum):
    """What has become of a rollout that was requested.

    Attributes:
        COLLECTING: its worker collects it.
        PREEMPTED: the same, and the worker was told to end it early.
        READY: it lies on its worker.
        FETCHING: it is on its way to the trainer.
        UNREACHABLE: fetching it failed. It is given up when its worker is lost.
        HERE: it is on the trainer.
        KEEPING: its worker was told to keep it for another trainer.
        KEPT: its worker keeps it for another trainer.
        REFERRED: the same, and the user has the reference to it.
        DELIVERED: the user, or another trainer, has it.
        GIVEN_UP: nobody gets it.
    """

    COLLECTING = "collecting"
    PREEMPTED = "preempted"
    READY = "ready"
    FETCHING = "fetching"
    UNREACHABLE = "unreachable"
    HERE = "here"
    KEEPING = "keeping"
    KEPT = "kept"
    REFERRED = "referred"
    DELIVERED = "delivered"
    GIVEN_UP = "given up"

    __hash__ = object.__hash__  # Enum's own takes four times as long


_S, _R = SlotState, RolloutState
_SLOT_TRANSITIONS: dict[SlotState, set[SlotState]] = {
    _S.SETTING_UP: {_S.SERVING, _S.LEAVING, _S.GONE},
    _S.SERVING: {_S.SETTING_UP, _S.LEAVING, _S.GONE},
    _S.LEAVING: {_S.DRAINED, _S.GONE},
    _S.DRAINED: {_S.GONE},
    _S.GONE: set(),
}
_ROLLOUT_TRANSITIONS: dict[RolloutState, set[RolloutState]] = {
    _R.COLLECTING: {_R.PREEMPTED, _R.READY, _R.GIVEN_UP},
    _R.PREEMPTED: {_R.READY, _R.GIVEN_UP},
    _R.READY: {_R.FETCHING, _R.KEEPING, _R.GIVEN_UP},
    _R.FETCHING: {_R.HERE, _R.UNREACHABLE, _R.GIVEN_UP},
    _R.UNREACHABLE: {_R.GIVEN_UP},
    _R.HERE: {_R.DELIVERED, _R.GIVEN_UP},
    _R.KEEPING: {_R.KEPT, _R.GIVEN_UP},
    _R.KEPT: {_R.REFERRED, _R.DELIVERED, _R.GIVEN_UP},
    _R.REFERRED: {_R.DELIVERED, _R.GIVEN_UP},
    _R.DELIVERED: {_R.GIVEN_UP},  # if an exception kept it from reaching the user
    _R.GIVEN_UP: set(),
}


@dataclass(eq=False, slots=True)
class WorkerSlot:
    """What the pool knows of a worker's process.

    Its n-th rollout lies in slab n modulo NUM_SLABS, so the next one may be requested as soon as
    the one before the last is settled, whatever has become of the last.

    Attributes:
        worker_id: its slot.
        incarnation: which process in that slot.
        peer: the process's id on the wire.
        joined: how many processes joined before it.
        is_reserved: it collects no rollouts.
        acknowledged: the newest policy_version that it has acknowledged.
        is_up_to_date: that is the newest version that was sent to it.
        setup_call: the setup call that it has to answer.
        setup_calls: by method, those that it gets after that one, with their arguments.
        collecting: the request that it works on.
        num_requests: rollouts requested from it.
        unsettled: numbers of the requests whose slab is still to be read.
        open: requests whose rollout is neither on the trainer nor given up.
        arrived: requests whose rollout waits for delivery, in the order of their arrival.
        batch: number of the last sync batch that it collects for.
        last_request: number of its last request among those of the pool.
        turn: with ``in_turn``, how many rollouts it has delivered.
    """

    worker_id: int
    incarnation: int
    peer: int
    joined: int = 0
    is_reserved: bool = False
    acknowledged: int = 0
    is_up_to_date: bool = True
    state: SlotState = SlotState.SETTING_UP
    setup_call: SetupCall | None = None
    setup_calls: dict[Callable[..., Any], tuple[SetupCall, Sequence[Any]]] = field(
        default_factory=dict
    )
    collecting: RolloutRequest | None = None
    num_requests: int = 0
    unsettled: set[int] = field(default_factory=set)
    open: set[RolloutRequest] = field(default_factory=set)
    arrived: list[RolloutRequest] = field(default_factory=list)
    batch: int = -1
    last_request: int = 0
    turn: int = 0

    def become(self, state: SlotState) -> None:
        """Change the state; RuntimeError if that is not possible from the present one."""
        if state not in _SLOT_TRANSITIONS[self.state]:
            raise RuntimeError(
                f"worker {self.worker_id}, incarnation {self.incarnation}: it is "
                f"{self.state.value} and can't become {state.value}"
            )
        self.state = state

    @property
    def is_gone(self) -> bool:
        """Whether its process answers nothing more."""
        return self.state is SlotState.GONE

    @property
    def is_staying(self) -> bool:
        """Whether it is there and was not told to leave."""
        return self.state in (SlotState.SETTING_UP, SlotState.SERVING)

    @property
    def may_be_asked(self) -> bool:
        """Whether rollouts may be requested from it at all."""
        return self.state is SlotState.SERVING and not self.is_reserved

    @property
    def has_a_slab(self) -> bool:
        """Whether there is memory for one more rollout."""
        return self.num_requests - NUM_SLABS not in self.unsettled

    @property
    def is_idle(self) -> bool:
        """Whether it collects nothing, and none of its rollouts waits for delivery."""
        return not (self.unsettled or self.arrived)

    @property
    def owes_rollouts(self) -> bool:
        """Whether it collects a rollout, or has one whose memory is still to be read."""
        return self.collecting is not None or bool(self.unsettled)


@dataclass(eq=False, slots=True)
class RolloutRequest(StalenessTicket):
    """A rollout that was requested.

    Attributes:
        slot: the worker's process.
        number: which of that process's rollouts, counted from 0.
        epoch: how often all requests had been given up before this one.
        wire_request: what is sent to the worker.
        asked_at: when that was, in nanoseconds.
        header: once it lies on its worker.
        offer: while it lies on its worker.
        tensors: while it is on the trainer and not the user's.
        arrival: how many rollouts arrived before it; -1 until it does.
        key: opens it for other trainers, if it is kept for them.
        held: by which another trainer's transport fetches it, see :meth:`.Transport.hand_over`.
    """

    slot: WorkerSlot
    number: int
    epoch: int
    wire_request: CollectRequest
    asked_at: int = 0
    state: RolloutState = RolloutState.COLLECTING
    header: Header | None = None
    offer: Offer | None = None
    tensors: Tensors | None = None
    arrival: int = -1
    key: str = ""
    held: Any = None

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

    def become(self, state: RolloutState) -> None:
        """Change the state; RuntimeError if that is not possible from the present one."""
        if state not in _ROLLOUT_TRANSITIONS[self.state]:
            raise RuntimeError(
                f"rollout {self.number} of worker {self.slot.worker_id}, incarnation "
                f"{self.slot.incarnation}: it is {self.state.value} and can't become {state.value}"
            )
        self.state = state


class WorkerSlots:
    """The worker processes that are there, and the slots that wait for a replacement.

    Attributes:
        coming: worker_ids whose next process is on its way.
        num_coming: of these, how many will collect.
        num_able: processes that are there and collect, or will.
        num_collecting: processes that work on a rollout now.
        behind: processes that collect and don't have the newest weights sent to them.
    """

    def __init__(self, versions: SentVersions, reserved: frozenset[int] = frozenset()) -> None:
        """Start empty; the workers ``reserved`` collect nothing."""
        self.coming: set[int] = set()
        self.num_coming = 0
        self.num_able = 0
        self.num_collecting = 0
        self.behind: set[WorkerSlot] = set()
        self._versions = versions
        self._reserved = reserved
        self._num_joined = 0
        self._present: dict[int, WorkerSlot] = {}
        self._worker_ids: tuple[int, ...] | None = ()

    def __iter__(self) -> Iterator[WorkerSlot]:
        """All processes that are there."""
        return iter(self._present.values())

    def __contains__(self, worker_id: int) -> bool:
        """Whether a process is in this slot, or on its way to it."""
        return worker_id in self._present or worker_id in self.coming

    def get(self, worker_id: int) -> WorkerSlot | None:
        """The process in a slot; None if there is none."""
        return self._present.get(worker_id)

    def find(self, worker_id: int, incarnation: int) -> WorkerSlot | None:
        """This very process; None if it is not there."""
        slot = self._present.get(worker_id)
        return slot if slot is not None and slot.incarnation == incarnation else None

    def add(self, worker_id: int, incarnation: int, peer: int, acknowledged: int) -> WorkerSlot:
        """A process has joined, with the weights of version ``acknowledged``."""
        self._set_coming(worker_id, is_coming=False)
        slot = WorkerSlot(
            worker_id, incarnation, peer, self._num_joined, worker_id in self._reserved
        )
        self._num_joined += 1
        self._present[worker_id] = slot
        self.num_able += not slot.is_reserved
        self._worker_ids = None
        self.acknowledge(slot, acknowledged)
        return slot

    def remove(self, worker_id: int, incarnation: int, *, replaced: bool) -> WorkerSlot | None:
        """A process is gone; ``replaced``: another one is on its way. None if it wasn't there."""
        self._worker_ids = None
        self._set_coming(worker_id, is_coming=replaced)
        slot = self.find(worker_id, incarnation)
        if slot is not None:
            del self._present[worker_id]
            slot.become(SlotState.GONE)
            self.num_able -= not slot.is_reserved
            self.behind.discard(slot)
            self.num_collecting -= slot.collecting is not None
        return slot

    def _set_coming(self, worker_id: int, *, is_coming: bool) -> None:
        if is_coming == (worker_id in self.coming):
            return
        if is_coming:
            self.coming.add(worker_id)
        else:
            self.coming.remove(worker_id)
        if worker_id not in self._reserved:
            self.num_coming += 1 if is_coming else -1

    def acknowledge(self, slot: WorkerSlot, version: int) -> None:
        """A process has the weights of this version."""
        slot.acknowledged = version
        self.compare_versions(slot)

    def compare_versions(self, slot: WorkerSlot) -> None:
        """Note whether a process has the newest weights sent to it; that may have changed."""
        slot.is_up_to_date = slot.acknowledged >= self._versions.newest(slot.worker_id)
        if slot.is_up_to_date or slot.is_reserved:
            self.behind.discard(slot)
        else:
            self.behind.add(slot)

    def begin_collecting(self, request: RolloutRequest) -> None:
        """A process works on this request from now on."""
        request.slot.collecting = request
        self.num_collecting += 1

    def end_collecting(self, slot: WorkerSlot) -> None:
        """A process works on no request any more."""
        slot.collecting = None
        if not slot.is_gone:
            self.num_collecting -= 1

    @property
    def worker_ids(self) -> tuple[int, ...]:
        """The slots in order, with those whose next process is on its way."""
        if self._worker_ids is None:
            self._worker_ids = tuple(sorted(self._present.keys() | self.coming))
        return self._worker_ids

    @property
    def some_collect_or_will(self) -> bool:
        """Whether there is a process that collects and stays, or one is on its way."""
        staying = (slot.is_staying and not slot.is_reserved for slot in self)
        return self.num_coming > 0 or any(staying)

    @property
    def able(self) -> Iterable[WorkerSlot]:
        """The processes that are there and collect, or will."""
        return (slot for slot in self._present.values() if not slot.is_reserved)
