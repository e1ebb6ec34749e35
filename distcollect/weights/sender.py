"""Sends each worker the newest version of the weights that was published for it.

:mod:`.slots` decides which workers get which version next, and an updater (:mod:`.updaters`) moves
the payload. Each receiver takes it into a spare buffer, compares its checksum and acknowledges; its
engine swaps the buffer in between two steps. Where all receive together, in a broadcast, each first
says that it is ready, so that none is left hanging in a collective that another never enters.

A receiver that is late, dies or gets a damaged copy is left out of the push, and the others go on.
A late one gets the newest version as soon as it answers.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_EXCEPTION, Future, wait
from functools import partial
from typing import Any, TypeAlias

import torch

from distcollect.common.clock import clock_ns
from distcollect.common.threads import SerialThread
from distcollect.common.waiting import missing
from distcollect.config import WeightSync
from distcollect.errors import (
    DistCollectError,
    WeightsTimeout,
    WorkerError,
    WorkerLost,
    slot_name,
)
from distcollect.policy.weight_layout import WeightEncoding, WeightLayout, checksum
from distcollect.telemetry.trace import PushTimes
from distcollect.transport.protocol import Transport
from distcollect.transport.worker_service import Push, WeightSource, WorkerService
from distcollect.weights.push_handle import PushHandle
from distcollect.weights.slots import PlannedPush, Publication, WeightSlots
from distcollect.weights.updaters import WeightUpdaterBase

log = logging.getLogger(__name__)

Answers: TypeAlias = Mapping[int, Future[Any]]  # by worker_id
# Stands for the trainer among the worker_ids of those that a transfer waits for.
_TRAINER = -1


class WeightSender:
    """The trainer's side: sends to each worker the newest version that was published for it.

    The callbacks are called without any lock.

    Attributes:
        on_acknowledged: called with (worker_id, version) when a worker has acknowledged one.
        on_left_out: called with (worker_id, error) when a worker is left out of a version.
        on_pushed: called after each push.
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
        self.on_acknowledged: Callable[[int, int], None] = lambda *_: None
        self.on_left_out: Callable[[int, DistCollectError], None] = lambda *_: None
        self.on_pushed: Callable[[PushTimes], None] = lambda _: None
        self._transport = transport
        self._layout = layout
        self._updater = updater
        self._options = options
        self._timeout_s = timeout_s
        self._lock = threading.RLock()  # of the slots
        self._slots = WeightSlots()
        self._last: Publication | None = None  # that changes are worked out against
        self._thread = SerialThread("distcollect-weights")
        self._watch_thread = SerialThread("distcollect-weights-watch")
        # A receiver that does not answer, and gives no sign of life, for this long is late.
        self._patience_s = min(timeout_s, options.ready_timeout_s)
        self._closed = False

    def acknowledged(self, worker_id: int) -> int:
        """The newest version that a worker has acknowledged, or started with."""
        return self._slots.acknowledged(worker_id)

    def is_coming(self, worker_id: int) -> bool:
        """Return True if weights are to be sent to a worker, or are being sent."""
        return self._slots.is_coming(worker_id)

    def publish(
        self, flat: torch.Tensor, version: int, worker_ids: Sequence[int], *, apart: bool = False
    ) -> PushHandle:
        """Send ``flat`` as ``version``, in place of what was published and not sent yet.

        Args:
            flat: the snapshot, uint8; must not be changed any more.
            version: its policy_version, higher than all before.
            worker_ids: the workers that get it.
            apart: no newer weights of other workers take its place.
        """
        # For all to be ready, to be sent to and to acknowledge.
        limit_s = self._options.ready_timeout_s + 2 * self._timeout_s
        handle = PushHandle(version, sorted(worker_ids), limit_s)
        with self._lock:
            self._slots.publish(flat, clock_ns(), handle, apart=apart)
        self._thread.put(self._send_all)
        return handle

    def welcome(self, worker_id: int, peer: int) -> int:
        """A new process is in a slot: it gets the newest version that its slot was to have.

        In a slot that is new, that is the newest version for all; in one that was given up, too,
        unless a newer one was for it alone.

        Returns:
            The version; 0: there is none newer than what the process starts with.
        """
        with self._lock:
            version = self._slots.welcome(worker_id, peer)
        if version:
            self._thread.put(self._send_all)
        return version

    def first_versions(self) -> set[int]:
        """The versions that a process which comes may begin with."""
        with self._lock:
            return self._slots.first_versions

    def resume(self, version: int) -> int:
        """Renumber: the weights that workers have, or were sent, are ``version`` from now on.

        Returns:
            How often versions were renumbered: the generation that workers need to be told.
        """
        with self._lock:
            self._last = None
            return self._slots.resume(version)

    def forget(self, worker_id: int, *, replaced: bool) -> None:
        """A worker is gone: nothing is sent to it any more; ``replaced``: another one comes."""
        with self._lock:
            peer = self._slots.forget(worker_id, replaced=replaced)
        if peer is not None:
            self._updater.forget(peer)

    def expect_nobody(self) -> None:
        """Workers that are gone are not replaced any more."""
        with self._lock:
            absent = self._slots.absent
        for worker_id in absent:
            self.forget(worker_id, replaced=False)

    def close(self) -> None:
        """Send nothing more; what was not sent fails."""
        with self._lock:
            self._closed = True
            self._slots.close()
        self._thread.put(self._watch_thread.close)  # what is under way is still watched
        self._thread.close()
        self._updater.close()

    # On the sender's thread.

    def _send_all(self) -> None:
        """Send until every worker that answers has the newest version for it."""
        while not self._closed:
            with self._lock:
                push = self._slots.next_push()
            if push is None:
                return
            try:
                self._send(push)
            except BaseException as error:  # an updater of the user's may exit
                if self._closed:
                    return  # the handles have got an error already
                version = push.publication.version
                log.exception("version %d could not be sent", version)
                for worker_id in push.receivers:
                    message = f"sending it version {version} failed: {error!r}"
                    self._failed(worker_id, push, WorkerError(message))
            finally:
                with self._lock:
                    self._slots.send_again(push.receivers.values())

    def _send(self, push: PlannedPush) -> None:
        publication = push.publication
        begin_ns = clock_ns()
        data, encoding, base = self._payload(push)
        sources = self._updater.sources(data, push.peers)
        together, relays = self._updater.together, self._updater.relays
        if left_out := push.receivers.keys() - sources.keys() - relays.keys():
            raise WorkerError(f"{self._updater!r} has no source for workers {sorted(left_out)}")
        first = push.only(sources)
        preparing: Answers = {}
        if together:
            preparing = self._call(first, WorkerService.prepare_to_receive, sources)
        message = partial(
            Push,
            publication.version,
            encoding=encoding,
            checksum=checksum(data),
            base=base,
            generation=publication.generation,
            changes_follow=self._options.changes_only,
        )
        if not self._all_ready(first, preparing):
            return  # those that are ready come again, as a group without the others
        ready_ns = clock_ns()
        sent_ns, answers = self._transfer(first, sources, message, data)
        # Those of a relay that failed come again, with another relay.
        places = {w: answers[relay] for w, relay in relays.items() if relay in answers}
        if places:
            self._transfer(push.only(places), places, message)
        end_ns = clock_ns()
        publication.handle.num_bytes = data.nbytes
        publication.handle.timings = {
            "ready_s": (ready_ns - begin_ns) / 1e9,
            "transfer_s": (sent_ns - ready_ns) / 1e9,
            "acknowledge_s": (end_ns - sent_ns) / 1e9,
            "total_s": (end_ns - publication.published_ns) / 1e9,
        }
        self.on_pushed(PushTimes(publication.version, begin_ns, ready_ns, sent_ns, end_ns))
        if self._options.changes_only:
            self._last = publication

    def _payload(self, push: PlannedPush) -> tuple[torch.Tensor, WeightEncoding, int]:
        """Return the payload, its encoding, and the version that it is a change of."""
        flat, last = push.publication.flat, self._last
        entries, base = None, 0
        if last is not None and last.flat.device == flat.device:
            with self._lock:
                are_changes = self._slots.all_have(last, push.receivers.values())
            if are_changes:
                entries, base = self._layout.changed(last.flat, flat), last.version
        encoding = WeightEncoding(self._options.narrow_dtype, entries)
        if encoding.is_whole:
            return flat, encoding, base
        layout = self._layout.reduced(encoding)
        data = layout.empty(flat.device)
        self._layout.transfer(flat, data, layout)
        return data, encoding, base

    def _call(
        self, push: PlannedPush, method: Callable[[Any, Any], Any], arguments: Mapping[int, Any]
    ) -> Answers:
        return {
            worker_id: self._transport.call(peer, method, arguments[worker_id])
            for worker_id, peer in push.peers.items()
        }

    def _all_ready(self, push: PlannedPush, preparing: Answers) -> bool:
        limit_s = self._options.ready_timeout_s
        late = missing(preparing, limit_s)
        for worker_id, answer in preparing.items():
            if worker_id in late:
                late_error = _late("was not ready to receive", worker_id, push, limit_s)
                self._failed(worker_id, push, late_error, was_sent=False, owed=answer)
            elif (error := answer.exception()) is not None:
                self._failed(worker_id, push, error)
        return not late and all(answer.exception() is None for answer in preparing.values())

    def _transfer(
        self,
        push: PlannedPush,
        sources: Mapping[int, WeightSource],
        message: Callable[..., Push],
        data: torch.Tensor | None = None,
    ) -> tuple[int, Mapping[int, Any]]:
        """Have each worker receive from its source, and note what became of it.

        Args:
            push: what is sent to whom.
            sources: by worker_id.
            message: makes the message to a worker, with its source.
            data: what the updater is to send meanwhile, if anything.

        Returns:
            When that was over, and the answers of the workers that have acknowledged.
        """
        begin_ns = clock_ns()
        messages = {worker_id: message(source=source) for worker_id, source in sources.items()}
        answers = self._call(push, WorkerService.receive_weights, messages)
        together = data is not None and self._updater.together
        sending: Future[None] = Future()
        watching = self._watch_thread.submit(self._watch, push, answers, sending, together)
        try:
            if data is not None:
                self._updater.send(data)
            sending.set_result(None)
        except BaseException as broken:
            sending.set_exception(broken)
            if not isinstance(broken, RuntimeError):
                raise
            # The acknowledgements will show which receiver failed, and which have it all the same.
            log.info("sending broke off: %s", broken)
        sent_ns = clock_ns()
        late = watching.result()
        waited_s = (clock_ns() - begin_ns) / 1e9
        errors = {w: answer.exception() for w, answer in answers.items() if w not in late}
        # In a group, one that dies or falls silent is the reason for the others' errors.
        has_culprit = (together and bool(late)) or any(
            isinstance(error, WorkerLost) for error in errors.values()
        )
        for worker_id, answer in answers.items():
            error = errors.get(worker_id)
            if worker_id in late or error is not None:
                # The connection with a receiver that failed may be in any state.
                self._updater.forget(push.peers[worker_id])
            if worker_id in late:
                late_error = _late("did not acknowledge", worker_id, push, waited_s)
                self._failed(worker_id, push, late_error, owed=answer)
            elif error is None:
                self._succeeded(worker_id, push)
            elif isinstance(error, WorkerLost) or not has_culprit:
                self._failed(worker_id, push, error)
        return sent_ns, {w: answers[w].result() for w, error in errors.items() if error is None}

    # On the watching thread, as sending may have to be broken off.

    def _watch(
        self, push: PlannedPush, answers: Answers, sending: Future[None], together: bool
    ) -> Collection[int]:
        """Wait until the trainer's part is over, and each receiver has answered or is late.

        If all must take part and one fails or falls silent, such as a stopped process or one of a
        host that has vanished, the trainer's part ends, and the others are told not to wait for it.
        So they are in any case if the trainer's part fails.

        Returns:
            The receivers that give no sign of life, or did not acknowledge in time.
        """
        waited_for: dict[int, Future[Any]] = {**answers, _TRAINER: sending}
        late: set[int] = set()
        cancels: Answers | None = None
        sent_ns = 0
        while waited_for:
            until = FIRST_EXCEPTION if cancels is None else ALL_COMPLETED
            ended, _ = wait(waited_for.values(), self._patience_s, until)
            waited_for = {w: each for w, each in waited_for.items() if each not in ended}
            if _TRAINER not in waited_for:
                sent_ns = sent_ns or clock_ns()
            has_failed = any(each.exception() is not None for each in ended)
            if not has_failed:
                silent = self._silent(push, waited_for, sent_ns)
                late.update(silent)
                waited_for = {w: each for w, each in waited_for.items() if w not in silent}
                has_failed = bool(silent)
            sending_failed = sending in ended and sending.exception() is not None
            if cancels is None and (sending_failed or (has_failed and together)):
                cancels = self._break_off(push, answers)
        # Until nothing of it can disturb the next transfer to the same receivers: the end of this
        # one, on its way to a receiver that is not late, could be taken for the end of the next.
        missing({w: each for w, each in (cancels or {}).items() if w not in late}, self._patience_s)
        return late

    def _silent(
        self, push: PlannedPush, waited_for: Collection[int], sent_ns: int
    ) -> Collection[int]:
        """Return the receivers that are late; ``sent_ns``: when the trainer's part was over, or 0.

        They give no sign of life for as long as they were waited for. One that gives it may merely
        take long, but not longer than the push's timeout.
        """
        workers = [worker_id for worker_id in waited_for if worker_id != _TRAINER]
        if sent_ns and clock_ns() > sent_ns + self._timeout_s * 1e9:
            return workers
        signs = {}
        for worker_id in workers:
            peer = push.peers[worker_id]
            if sent_ns:
                signs[worker_id] = self._transport.call(peer, WorkerService.prepare_to_receive)
            else:  # it may wait for another one
                signs[worker_id] = self._transport.ping(peer)
        return missing(signs, self._patience_s)

    def _break_off(self, push: PlannedPush, answers: Answers) -> Answers:
        """End the trainer's part, and tell the receivers not to wait for each other."""
        for peer in push.peers.values():
            self._updater.forget(peer)
        # The member that was to pass the payload on to one that has not answered may be gone.
        return {
            worker_id: self._transport.call(peer, WorkerService.cancel_receiving)
            for worker_id, peer in push.peers.items()
            if not answers[worker_id].done()
        }

    # What becomes of a receiver.

    def _succeeded(self, worker_id: int, push: PlannedPush) -> None:
        publication = push.publication
        with self._lock:
            handles = self._slots.acknowledge(push.receivers[worker_id], publication)
        if handles is None:
            return
        # The pool first: a thread that waits for a handle may ask the pool once it is settled.
        self.on_acknowledged(worker_id, publication.version)
        for handle in handles:
            handle.settle(worker_id, publication.version)

    def _failed(
        self,
        worker_id: int,
        push: PlannedPush,
        error: BaseException,
        *,
        was_sent: bool = True,
        owed: Future[Any] | None = None,
    ) -> None:
        """Try again, or leave the worker out; ``owed``: until it has given this answer."""
        slot = push.receivers[worker_id]
        if isinstance(error, WorkerLost):
            log.info("%s can't be reached: %r", slot_name(worker_id), error.__cause__ or error)
            error = WorkerLost("can't be reached", worker_id=worker_id)
        with self._lock:
            left_out = self._slots.fail(
                slot, push.publication, error, was_sent=was_sent, owes_answer=owed is not None
            )
        if left_out is None:
            return
        if not isinstance(error, WorkerLost):
            version = push.publication.version
            log.warning("%s is left out of version %d: %s", slot_name(worker_id), version, error)
        if owed is None:
            self.on_left_out(worker_id, left_out)
            return

        def answered(_: Future[Any]) -> None:
            with self._lock:
                self._slots.answered(slot)
                if self._closed:
                    return
            self._thread.put(self._send_all)

        owed.add_done_callback(answered)


def _late(what: str, worker_id: int, push: PlannedPush, after_s: float) -> WeightsTimeout:
    return WeightsTimeout(
        f"{slot_name(worker_id)} {what} version {push.publication.version} within {after_s:.3g} s; "
        "it gets the newest one as soon as it answers"
    )
