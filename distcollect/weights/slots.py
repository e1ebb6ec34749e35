"""Decides which version each worker gets next, without threads, sockets or clocks.

Each worker's slot has a state::

    IDLE ──publish──▶ WAITING ──next_push──▶ SENDING ──acknowledged──▶ IDLE
                         ▲                      │ failed, not sent
                         ├──────────────────────┤
                         └──answered── AWAY ◀───┘ no answer in time

Waiting slots are served in the order in which they began to wait. So each gets its version after at
most as many pushes as there were slots waiting before it, however fast versions are published.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

import torch

from distcollect.errors import CollectorStateError, DistCollectError, WorkerError, WorkerLost
from distcollect.weights.push_handle import PushHandle

# A broadcast that one receiver's death breaks off leaves the others without the version, too.
_MAX_ATTEMPTS = 3
# The handles of a late worker that are updated once it has caught up.
_MAX_HANDLES = 16
# Snapshots kept for workers that wait for them, and for processes that replace a worker's; besides
# those of weights that only these workers have.
_MAX_SNAPSHOTS = 8


class SendState(Enum):
    """The next thing that happens with a worker's slot."""

    IDLE = "nothing is to be sent"
    WAITING = "its newest version is to be sent"
    SENDING = "a version is being sent"
    AWAY = "it owes an answer, or another process comes in its place"


@dataclass(frozen=True, eq=False)
class Publication:
    """A version, and the snapshot of the weights.

    Attributes:
        version: its policy_version.
        flat: the snapshot, uint8 ``[N]``.
        handle: the user's.
        published_ns: when it was published.
        order: counts the publications, also where versions are renumbered.
        apart: its workers have weights of their own: newer ones of others don't take their place.
        generation: how often versions had been renumbered.
    """

    version: int
    flat: torch.Tensor
    handle: PushHandle
    published_ns: int
    order: int
    apart: bool
    generation: int


@dataclass(eq=False)
class WeightSlot:
    """A worker's slot, as long as it has the same process.

    Attributes:
        worker_id: whose it is.
        peer: its process; None: it is gone, or the first one is still to come.
        newest: the newest version that was published for it, or if its snapshot was dropped the
            next newer one; None: none was published. With this one it has what it is to have.
        acknowledged: the version that the process has.
        held: the order of the publication that it has; 0: its first weights. Unlike a version, an
            order never stands for other weights.
        state: see :class:`SendState`.
        turn: when it began to wait, among the slots that wait.
        failures: how often in a row a push failed. Then the next one goes to no other worker.
        absence: why it is AWAY.
        handles: those that wait for it, with the order of their publication.
    """

    worker_id: int
    peer: int | None
    newest: Publication | None = None
    acknowledged: int = 0
    held: int = 0
    state: SendState = SendState.IDLE
    turn: int = 0
    failures: int = 0
    absence: DistCollectError | None = None
    handles: list[tuple[int, PushHandle]] = field(default_factory=list)

    def settle(self, outcome: int | DistCollectError, *, for_now: bool = False) -> None:
        """Tell the handles that wait for it; they go on waiting if it is ``for_now``."""
        for _, handle in self.handles:
            handle.settle(self.worker_id, outcome, for_now=for_now)
        if for_now:
            del self.handles[:-_MAX_HANDLES]
        else:
            self.handles.clear()


@dataclass(frozen=True)
class PlannedPush:
    """A version to send, and by worker_id the slots that get it together, and their processes."""

    publication: Publication
    receivers: Mapping[int, WeightSlot]
    peers: Mapping[int, int]

    def only(self, worker_ids: Collection[int]) -> PlannedPush:
        """The part of it that goes to these workers."""
        return replace(self, peers={w: p for w, p in self.peers.items() if w in worker_ids})


class WeightSlots:
    """The slots of all workers. The caller locks.

    What is said of a receiver that is no longer SENDING is ignored: its process is gone.
    """

    def __init__(self) -> None:
        self._slots: dict[int, WeightSlot] = {}
        self._latest: Publication | None = None  # for workers that come
        self._kept: dict[int, Publication] = {}  # apart and newer, of slots that were given up
        self._first_version = 0  # that new processes start with
        self._generation = 0
        self._orders = itertools.count(1)
        self._turns = itertools.count()

    # What the pool says.

    def acknowledged(self, worker_id: int) -> int:
        """The newest version that a worker has acknowledged, or started with."""
        slot = self._slots.get(worker_id)
        return 0 if slot is None else slot.acknowledged

    def is_coming(self, worker_id: int) -> bool:
        """Return True if weights are to be sent to a worker, or are being sent."""
        slot = self._slots.get(worker_id)
        return slot is not None and slot.state in (SendState.WAITING, SendState.SENDING)

    def publish(
        self, flat: torch.Tensor, published_ns: int, handle: PushHandle, *, apart: bool
    ) -> None:
        """Have ``flat`` sent to the handle's workers, in place of what they wait for."""
        order = next(self._orders)
        publication = Publication(
            handle.version, flat, handle, published_ns, order, apart, self._generation
        )
        if not apart:
            self._latest = publication
            if self._slots.keys() <= {*handle.worker_ids}:  # also for those that come back
                self._kept.clear()
        for worker_id in handle.worker_ids:
            slot = self._slots.get(worker_id)
            if slot is None:
                handle.settle(worker_id, WorkerLost("is gone", worker_id=worker_id))
                continue
            slot.newest = publication
            slot.handles.append((publication.order, handle))
            if slot.state is SendState.IDLE:
                self._wait(slot)
            elif slot.state is SendState.AWAY and slot.absence is not None:
                slot.settle(slot.absence, for_now=True)
        self._drop_old_snapshots()

    def welcome(self, worker_id: int, peer: int) -> int:
        """A new process is in a slot; see :meth:`.WeightSender.welcome`."""
        before = self._slots.get(worker_id)
        slot = self._slots[worker_id] = self._new(worker_id, peer)
        slot.acknowledged = self._first_version
        if before is not None:
            slot.newest, slot.handles = before.newest, before.handles
            before.state, before.peer = SendState.AWAY, None
        if slot.newest is None:
            return 0
        # Its weights are older, even where versions were renumbered.
        slot.acknowledged = min(slot.acknowledged, slot.newest.version - 1)
        self._wait(slot)
        return slot.newest.version

    def _new(self, worker_id: int, peer: int | None) -> WeightSlot:
        return WeightSlot(worker_id, peer, self._kept.pop(worker_id, self._latest))

    def forget(self, worker_id: int, *, replaced: bool) -> int | None:
        """A slot's process is gone; ``replaced``: another one comes. Its peer, if it had one."""
        slot = self._slots.get(worker_id)
        if slot is None:
            if not replaced:
                return None
            slot = self._slots[worker_id] = self._new(worker_id, None)
        peer, slot.peer = slot.peer, None
        slot.acknowledged = slot.held = 0
        slot.state = SendState.AWAY
        if not replaced:
            if slot.newest is not None and slot.newest.apart:
                self._kept[worker_id] = slot.newest
            del self._slots[worker_id]
            slot.settle(WorkerLost("is gone", worker_id=worker_id))
            return peer
        slot.absence = WorkerLost(
            "is gone; the process that replaces it gets the newest weights first",
            worker_id=worker_id,
        )
        slot.settle(slot.absence, for_now=True)
        return peer

    @property
    def _publications(self) -> list[Publication]:
        """Those that a process has, or is to have."""
        newest = (self._latest, *self._kept.values(), *(s.newest for s in self._slots.values()))
        return [publication for publication in newest if publication is not None]

    @property
    def first_versions(self) -> set[int]:
        """Those that a process which comes may begin with."""
        return {self._first_version, *(each.version for each in self._publications)}

    @property
    def absent(self) -> list[int]:
        """The workers that are to be replaced."""
        return [w for w, slot in self._slots.items() if slot.peer is None]

    def resume(self, version: int) -> int:
        """Renumber, see :meth:`.WeightSender.resume`."""
        self._generation += 1
        self._first_version = version
        renumbered = {
            publication: replace(publication, version=version, generation=self._generation)
            for publication in self._publications
        }
        self._kept = {worker_id: renumbered[each] for worker_id, each in self._kept.items()}
        self._latest = renumbered.get(self._latest)  # type: ignore[arg-type]
        for slot in self._slots.values():
            slot.newest = renumbered.get(slot.newest)  # type: ignore[arg-type]
            # A worker that waits for weights does not have them yet.
            slot.acknowledged = version if slot.state is SendState.IDLE else version - 1
        return self._generation

    def close(self) -> None:
        """Send nothing more; handles that wait get an error."""
        for slot in self._slots.values():
            slot.settle(
                CollectorStateError("the collector was shut down before these weights were sent")
            )
            slot.state, slot.peer = SendState.AWAY, None
        self._slots.clear()

    # What the sender asks, and what comes of it.

    def next_push(self) -> PlannedPush | None:
        """Return the next version to send, and its receivers, which are SENDING now; None: none."""
        waiting = [slot for slot in self._slots.values() if slot.state is SendState.WAITING]
        if not waiting:
            return None
        first = min(waiting, key=lambda slot: slot.turn)
        receivers = {
            slot.worker_id: slot
            for slot in waiting
            if slot is first
            or (slot.newest is first.newest and not slot.failures and not first.failures)
        }
        for slot in receivers.values():
            slot.state = SendState.SENDING
        assert first.newest is not None
        peers = {w: slot.peer for w, slot in receivers.items() if slot.peer is not None}
        return PlannedPush(first.newest, receivers, peers)

    def all_have(self, publication: Publication, slots: Iterable[WeightSlot]) -> bool:
        """Return True if these workers have exactly this version, as far as is known."""
        # After a failure a worker may have another version than it acknowledged.
        return publication.generation == self._generation and all(
            slot.held == publication.order and not slot.failures for slot in slots
        )

    def acknowledge(self, slot: WeightSlot, publication: Publication) -> list[PushHandle] | None:
        """A receiver has a version; the handles to settle. None: it no longer counts."""
        if slot.state is not SendState.SENDING:
            return None
        if publication.generation != self._generation:
            self._wait(slot)
            return None
        slot.acknowledged = publication.version
        slot.held = publication.order
        slot.failures = 0
        done = [handle for order, handle in slot.handles if order <= publication.order]
        slot.handles = [item for item in slot.handles if item[0] > publication.order]
        if slot.newest is publication:
            slot.state = SendState.IDLE
        else:
            self._wait(slot)
        return done

    def fail(
        self,
        slot: WeightSlot,
        publication: Publication,
        error: BaseException,
        *,
        was_sent: bool,
        owes_answer: bool,
    ) -> DistCollectError | None:
        """A receiver has not got a version; a push that failed is tried again, up to three times.

        Args:
            slot: the receiver's.
            publication: the version.
            error: why.
            was_sent: it failed after all were ready, so the next push goes to no other worker.
            owes_answer: it is sent nothing until :meth:`answered`.

        Returns:
            The error, if the worker is left out of the version, perhaps only for now.
        """
        if slot.state is not SendState.SENDING:
            return None
        slot.failures += was_sent
        if not isinstance(error, DistCollectError):
            error = WorkerError(f"received no weights: {error!r}", worker_id=slot.worker_id)
        if owes_answer or isinstance(error, WorkerLost):  # which will not answer
            slot.state, slot.absence = SendState.AWAY, error
            slot.settle(error, for_now=True)
        elif slot.failures < _MAX_ATTEMPTS or slot.newest is not publication:
            self._wait(slot)
            return None
        else:
            slot.state = SendState.IDLE
            slot.settle(error)
        return error

    def answered(self, slot: WeightSlot) -> None:
        """A late receiver has given the answer that it owed: it waits for its newest version."""
        if slot.state is SendState.AWAY and slot.peer is not None:
            self._wait(slot)

    def send_again(self, slots: Iterable[WeightSlot]) -> None:
        """The receivers that are still SENDING, as the push ended without a result, wait again."""
        for slot in slots:
            if slot.state is SendState.SENDING:
                self._wait(slot)

    def _wait(self, slot: WeightSlot) -> None:
        slot.state = SendState.WAITING
        slot.turn = next(self._turns)

    def _drop_old_snapshots(self) -> None:
        """Keep a bounded number; a slot whose version is dropped gets the next newer one.

        Not where others' newer weights would be other weights: what is apart is kept.
        """
        newest = {s.newest for s in self._slots.values() if s.newest and not s.newest.apart}
        kept = sorted(newest, key=lambda publication: publication.order)[-_MAX_SNAPSHOTS:]
        for slot in self._slots.values():
            if slot.newest in newest.difference(kept):
                slot.newest = kept[0]
