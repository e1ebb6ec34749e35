"""The weight plane: who gets which version when.

Each receiver takes the payload (:mod:`.updaters`) into a spare buffer, compares its checksum and
acknowledges; its engine swaps the buffer in between two steps. Where all receive together, in a
broadcast, each first says that it is ready, so that nobody is left hanging in a collective that
another never enters.

A receiver that is late, dead or torn is left out, and the others go on. Who is late gets the newest
version as soon as it answers again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from distcollect.common.clock import clock_ns
from distcollect.common.threads import SerialThread, missing
from distcollect.config import WeightSync
from distcollect.errors import (
    CollectorStateError,
    DistCollectError,
    WeightsTimeout,
    WorkerError,
    WorkerLost,
)
from distcollect.policy.weight_layout import WeightLayout, Wire, checksum
from distcollect.transport.protocol import Transport
from distcollect.weights.push_handle import PushHandle, PushRecord
from distcollect.weights.receiver import Push
from distcollect.weights.updaters import WeightUpdaterBase

log = logging.getLogger(__name__)

# A broadcast that one receiver's death breaks off leaves the others without the version, too.
_MAX_ATTEMPTS = 3
# Of a late worker, that learn of it when it has caught up.
_MAX_HANDLES = 16


@dataclass
class _Publication:
    """A version and the snapshot that it is."""

    version: int
    flat: torch.Tensor
    since: int = field(default_factory=clock_ns)
    record: PushRecord = field(default_factory=PushRecord)


@dataclass
class _Slot:
    """What a worker is to get.

    Attributes:
        peer: its process; None while it is being replaced.
        wanted: the newest that was published for it and that it has not acknowledged.
        acknowledged: the version that it has.
        late: why it is not sent anything until it has given the answer that it owes.
        attempts: how often in a row something was sent to it in vain.
        handles: those that wait for it.
    """

    peer: int | None
    wanted: _Publication | None = None
    acknowledged: int = 0
    late: WeightsTimeout | None = None
    attempts: int = 0
    handles: list[PushHandle] = field(default_factory=list)


class WeightSender:
    """The trainer's side: sends to each worker the newest version that was published for it.

    Attributes:
        on_acknowledged: is told (worker_id, version) whenever one has acknowledged.
        on_left_out: is told (worker_id, error) when one is given up on for a version.
        on_pushed: is told (version, begin, ready, sent, end), in nanoseconds, of what was sent.
    """

    def __init__(
        self,
        transport: Transport,
        layout: WeightLayout,
        updater: WeightUpdaterBase,
        *,
        options: WeightSync,
        timeout_s: float,
    ) -> None:
        """Prepare to send.

        Args:
            transport: for the control messages.
            layout: of the flat buffers.
            updater: moves the payload; attached already.
            options: what travels.
            timeout_s: for a payload to be received and acknowledged.
        """
        self.on_acknowledged: Callable[[int, int], None] = _nobody_cares
        self.on_left_out: Callable[[int, DistCollectError], None] = _nobody_cares
        self.on_pushed: Callable[[int, int, int, int, int], None] = lambda *_: None
        self._transport = transport
        self._layout = layout
        self._updater = updater
        self._options = options
        self._timeout_s = timeout_s
        self._lock = threading.RLock()
        self._slots: dict[int, _Slot] = {}
        self._first = 0  # the version that workers start with
        self._newest: dict[int, _Publication] = {}  # for each slot, for whoever comes into it
        self._vacated: set[int] = set()  # slots that nobody was to come back to
        self._last: _Publication | None = None  # what acknowledged versions are compared with
        self._thread = SerialThread("distcollect-weights")
        self._closed = False

    def acknowledged(self, worker_id: int) -> int:
        """The newest version that a worker has acknowledged, or started with."""
        slot = self._slots.get(worker_id)
        return 0 if slot is None else slot.acknowledged

    def publish(self, flat: torch.Tensor, version: int, worker_ids: Sequence[int]) -> PushHandle:
        """Send ``flat`` as ``version``, in place of what was published and not sent yet.

        Args:
            flat: the snapshot, uint8; must not be changed any more.
            version: its policy_version, higher than all before.
            worker_ids: to whom.
        """
        publication = _Publication(version, flat)
        # To be ready, to be sent to, to acknowledge.
        limit_s = self._options.ready_timeout_s + 2 * self._timeout_s
        handle = PushHandle(version, sorted(worker_ids), publication.record, limit_s)
        with self._lock:
            for worker_id in handle.worker_ids:
                self._newest[worker_id] = publication
                slot = self._slots.get(worker_id)
                if slot is None:
                    handle.settle(worker_id, WorkerLost("is gone", worker_id=worker_id))
                    continue
                slot.wanted = publication
                slot.handles.append(handle)
                absence = _replaced(worker_id) if slot.peer is None else slot.late
                if absence is not None:
                    handle.settle(worker_id, absence, for_now=True)
                    del slot.handles[:-_MAX_HANDLES]
        self._thread.submit(self._send_all)
        return handle

    def welcome(self, worker_id: int, peer: int) -> int:
        """A new process is in a slot: it gets the newest version that its slot was to have.

        In a slot that is new, or that nobody was to come back to, that is the newest of all.

        Returns:
            The version; 0: what it has is the newest.
        """
        with self._lock:
            newest = None if worker_id in self._vacated else self._newest.get(worker_id)
            newest = newest or max(
                self._newest.values(), key=lambda publication: publication.version, default=None
            )
            self._vacated.discard(worker_id)
            before = self._slots.get(worker_id)
            handles = before.handles if before is not None else []
            self._slots[worker_id] = _Slot(peer, newest, self._first, handles=handles)
            if newest is None:
                return 0
            self._newest[worker_id] = newest
        self._thread.submit(self._send_all)
        return newest.version

    def resume(self, version: int) -> None:
        """What all workers have now, or start with from now on, is ``version``."""
        with self._lock:
            self._first = version
            self._newest = {
                worker_id: _Publication(version, publication.flat)
                for worker_id, publication in self._newest.items()
            }
            for slot in self._slots.values():
                slot.acknowledged = version

    def forget(self, worker_id: int, *, replaced: bool) -> None:
        """A worker is gone: nothing is sent to it any more; ``replaced``: another one comes."""
        with self._lock:
            slot = self._slots.pop(worker_id, None)
            if slot is None:
                return
            if replaced:
                self._slots[worker_id] = _Slot(None, handles=slot.handles)
            else:
                self._vacated.add(worker_id)
        if slot.peer is not None:
            self._updater.forget(slot.peer)
        gone = _replaced(worker_id) if replaced else WorkerLost("is gone", worker_id=worker_id)
        _settle(slot.handles, worker_id, gone, for_now=replaced)

    def expect_nobody(self) -> None:
        """Nobody comes any more in place of those who are gone."""
        with self._lock:
            absent = [worker_id for worker_id, slot in self._slots.items() if slot.peer is None]
        for worker_id in absent:
            self.forget(worker_id, replaced=False)

    def close(self) -> None:
        """Send nothing more; what was not sent fails."""
        with self._lock:
            self._closed = True
            slots, self._slots = self._slots, {}
        for worker_id, slot in slots.items():
            _settle(
                slot.handles,
                worker_id,
                CollectorStateError("the collector was shut down before these weights were sent"),
            )
        self._thread.close()
        self._updater.close()

    def _send_all(self) -> None:
        """Send until every worker that answers has what is wanted for it; the newest first."""
        while not self._closed:
            with self._lock:
                due = [
                    slot.wanted
                    for slot in self._slots.values()
                    if slot.wanted is not None and slot.late is None and slot.peer is not None
                ]
                if not due:
                    return
                newest = max(due, key=lambda publication: publication.version)
                receivers = self._next_receivers(newest)
            try:
                self._send(newest, receivers)
            except Exception as error:
                if self._closed:
                    return  # what was not sent has failed already
                log.exception("version %d could not be sent", newest.version)
                for receiver in receivers.items():
                    message = f"sending it version {newest.version} failed: {error!r}"
                    self._failed(receiver, newest, WorkerError(message))

    def _next_receivers(self, publication: _Publication) -> dict[int, int]:
        """Whom to send it to together; who failed last time gets it alone, and last."""
        due = {
            worker_id: slot
            for worker_id, slot in self._slots.items()
            if slot.wanted is publication and slot.late is None
        }
        peers = {w: slot.peer for w, slot in due.items() if slot.peer is not None}
        sound = {w: peer for w, peer in peers.items() if not due[w].attempts}
        return sound or dict(list(peers.items())[:1])

    def _send(self, publication: _Publication, receivers: dict[int, int]) -> None:
        begin = clock_ns()
        wire, base, payload = self._payload(publication, receivers)
        sources = self._updater.sources(payload, receivers)
        joining: dict[int, Future[Any]] = {}
        if self._updater.together:
            joining = self._ask(receivers, "weights_ready", sources)
        sum_ = checksum(payload)
        if not self._all_ready(joining, receivers, publication):
            return  # the others come again, as a group without who isn't
        ready = clock_ns()
        pushes = {
            worker_id: Push(publication.version, source, wire, payload.nbytes, sum_, base)
            for worker_id, source in sources.items()
        }
        acknowledged = self._ask(receivers, "receive_weights", pushes)
        self._send_payload(payload, receivers, acknowledged)
        sent = clock_ns()
        late = self._late(acknowledged, receivers)
        end = clock_ns()
        publication.record.num_bytes = payload.nbytes
        publication.record.timings.update(
            ready_s=(ready - begin) / 1e9,
            transfer_s=(sent - ready) / 1e9,
            acknowledge_s=(end - sent) / 1e9,
            total_s=(end - publication.since) / 1e9,
        )
        self.on_pushed(publication.version, begin, ready, sent, end)
        if self._options.changes_only:
            self._last = publication
        # Whatever connects these with us may be in any state now.
        for worker_id, answer in acknowledged.items():
            if worker_id in late or answer.exception() is not None:
                self._updater.forget(receivers[worker_id])
        self._conclude(publication, receivers, acknowledged, late, (end - sent) / 1e9)

    def _ask(
        self, receivers: Mapping[int, int], method: str, arguments: Mapping[int, Any]
    ) -> dict[int, Future[Any]]:
        return {
            worker_id: self._transport.call(peer, method, arguments[worker_id])
            for worker_id, peer in receivers.items()
        }

    def _send_payload(
        self,
        payload: torch.Tensor,
        receivers: Mapping[int, int],
        acknowledged: Mapping[int, Future[Any]],
    ) -> None:
        """Send, and tell those who still wait for it if somebody's failure breaks it off."""
        broken_off = threading.Event()

        def break_off() -> None:
            if broken_off.is_set():
                return
            broken_off.set()
            for worker_id, peer in receivers.items():
                self._updater.forget(peer)
                # Who was to pass it on to this one may be gone.
                if not acknowledged[worker_id].done():
                    self._transport.call(peer, "give_weights_up")

        def answered(answer: Future[Any]) -> None:
            if answer.exception() is not None:
                break_off()

        if self._updater.together:
            for answer in acknowledged.values():
                answer.add_done_callback(answered)
        try:
            self._updater.send(payload)
        except RuntimeError as error:
            # Who is at fault, and who has it all the same, is told by the acknowledgements.
            log.info("sending broke off: %s", error)
            break_off()

    def _conclude(
        self,
        publication: _Publication,
        receivers: Mapping[int, int],
        acknowledged: Mapping[int, Future[Any]],
        late: Collection[int],
        waited_s: float,
    ) -> None:
        failures = {w: a.exception() for w, a in acknowledged.items() if w not in late}
        # A death is reason enough for the others' failures.
        somebody_died = any(isinstance(failure, WorkerLost) for failure in failures.values())
        for worker_id, answer in acknowledged.items():
            receiver = worker_id, receivers[worker_id]
            failure = failures.get(worker_id)
            if worker_id in late:
                self._is_late(receiver, answer, "did not acknowledge", waited_s)
            elif failure is None:
                self._succeeded(receiver, publication)
            elif isinstance(failure, WorkerLost) or not somebody_died:
                self._failed(receiver, publication, failure)

    def _all_ready(
        self,
        joining: Mapping[int, Future[Any]],
        receivers: Mapping[int, int],
        publication: _Publication,
    ) -> bool:
        limit_s = self._options.ready_timeout_s
        late = missing(joining, limit_s)
        all_ready = not late
        for worker_id, answer in joining.items():
            receiver = worker_id, receivers[worker_id]
            if worker_id in late:
                self._is_late(receiver, answer, "was not ready to receive", limit_s)
            elif (error := answer.exception()) is not None:
                self._failed(receiver, publication, error)
                all_ready = False
        return all_ready

    def _late(
        self,
        acknowledged: Mapping[int, Future[Any]],
        receivers: Mapping[int, int],
    ) -> list[int]:
        """Who answers nothing, or has not acknowledged in the time that a push may take."""
        limit_s = min(self._timeout_s, self._options.ready_timeout_s)
        slow = missing(acknowledged, limit_s)
        # It may merely take long to receive.
        asked = {w: self._transport.call(receivers[w], "weights_ready") for w in slow}
        late = missing(asked, limit_s)
        waited_for = {w: acknowledged[w] for w in slow if w not in late}
        return late + missing(waited_for, self._timeout_s - limit_s)

    def _payload(
        self, publication: _Publication, receivers: Mapping[int, int]
    ) -> tuple[Wire, int, torch.Tensor]:
        """What travels to receivers, and which version they must have for it."""
        entries = None
        base = 0
        last = self._last
        if last is not None and self._all_have(last.version, receivers):
            entries = self._layout.changed(last.flat, publication.flat)
            base = last.version
        wire = Wire(self._options.narrow_dtype, entries)
        if wire == Wire():
            return wire, base, publication.flat
        layout = self._layout.reduced(wire)
        payload = layout.empty(publication.flat.device)
        self._layout.transfer(publication.flat, payload, layout)
        return wire, base, payload

    def _all_have(self, version: int, worker_ids: Iterable[int]) -> bool:
        with self._lock:
            slots = [self._slots.get(worker_id) for worker_id in worker_ids]
        # Who could not take the last one may have another than we know of.
        return all(slot and slot.acknowledged == version and not slot.attempts for slot in slots)

    def _slot_of(self, receiver: tuple[int, int]) -> _Slot | None:
        """The slot of (worker_id, peer); None if another process is in it by now, or none."""
        worker_id, peer = receiver
        slot = self._slots.get(worker_id)
        return slot if slot is not None and slot.peer == peer else None

    def _succeeded(self, receiver: tuple[int, int], publication: _Publication) -> None:
        worker_id, _ = receiver
        with self._lock:
            slot = self._slot_of(receiver)
            if slot is None:
                return
            slot.acknowledged = publication.version
            slot.attempts = 0
            if slot.wanted is publication:
                slot.wanted = None
            done = [h for h in slot.handles if h.version <= publication.version]
            slot.handles = [h for h in slot.handles if h.version > publication.version]
        # First whoever goes by it, then whoever waits for it.
        self.on_acknowledged(worker_id, publication.version)
        _settle(done, worker_id, publication.version)

    def _failed(
        self, receiver: tuple[int, int], publication: _Publication, error: BaseException
    ) -> None:
        """Try again, unless that is in vain."""
        worker_id, _ = receiver
        with self._lock:
            slot = self._slot_of(receiver)
            if slot is None or slot.wanted is not publication:
                return
            slot.attempts += 1
            is_lost = isinstance(error, WorkerLost)
            if is_lost:
                slot.late = WeightsTimeout(f"worker {worker_id} is gone")  # see forget
            elif slot.attempts < _MAX_ATTEMPTS:
                return
            else:
                slot.wanted = None
                handles, slot.handles = slot.handles, []
        if is_lost:
            log.info("worker %d can't be reached: %r", worker_id, error.__cause__)
            self.on_left_out(worker_id, WorkerLost("can't be reached", worker_id=worker_id))
            return
        log.warning(
            "worker %d is left out of version %d: %s", worker_id, publication.version, error
        )
        if not isinstance(error, DistCollectError):
            error = WorkerError(f"received no weights: {error!r}", worker_id=worker_id)
        self.on_left_out(worker_id, error)
        _settle(handles, worker_id, error)

    def _is_late(
        self, receiver: tuple[int, int], answer: Future[Any], what: str, after_s: float
    ) -> None:
        """Go on without a worker until it has given the answer that it owes."""
        worker_id, _ = receiver
        with self._lock:
            slot = self._slot_of(receiver)
            if slot is None:
                return
            assert slot.wanted is not None
            slot.late = WeightsTimeout(
                f"worker {worker_id} {what} version {slot.wanted.version} within {after_s:.3g} s; "
                "it gets the newest one as soon as it answers"
            )
            handles = list(slot.handles)
        log.warning("%s", slot.late)
        _settle(handles, worker_id, slot.late, for_now=True)

        def answered(_: Future[Any]) -> None:
            with self._lock:
                slot.late = None
                if self._closed:
                    return
            self._thread.submit(self._send_all)

        answer.add_done_callback(answered)


def _settle(
    handles: Iterable[PushHandle],
    worker_id: int,
    outcome: int | DistCollectError,
    *,
    for_now: bool = False,
) -> None:
    for handle in handles:
        handle.settle(worker_id, outcome, for_now=for_now)


def _replaced(worker_id: int) -> WorkerLost:
    return WorkerLost(
        "is gone; who takes its place gets the newest weights first", worker_id=worker_id
    )


def _nobody_cares(worker_id: int, outcome: object) -> None:
    """Before the pool is there."""
