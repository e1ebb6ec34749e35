"""A payload on its way to several receivers, and what breaks it off."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from typing import Any, TypeAlias

from distcollect.common.replies import missing
from distcollect.transport.protocol import Transport
from distcollect.transport.worker_service import WorkerService
from distcollect.weights.slots import PlannedPush
from distcollect.weights.updaters import WeightUpdaterBase

Answers: TypeAlias = Mapping[int, Future[Any]]  # by worker_id


class Transfer:
    """A payload on its way to several receivers.

    Attributes:
        push: what is sent to whom.
        answers: of the receivers.
        together: whether it only works if all receivers take part.
        is_sent: set when the trainer's part is over.
        silent: receivers that gave no sign of life before that.
        succeeded: receivers that have acknowledged, once all is over.
    """

    def __init__(
        self,
        transport: Transport,
        updater: WeightUpdaterBase,
        push: PlannedPush,
        answers: Answers,
        patience_s: float,
        *,
        together: bool,
    ) -> None:
        """A receiver that doesn't answer for ``patience_s``, and then no ping either, is silent."""
        self.push = push
        self.answers = answers
        self.together = together
        self.is_sent = threading.Event()
        self.silent: set[int] = set()
        self.succeeded: set[int] = set()
        self._transport = transport
        self._updater = updater
        self._patience_s = patience_s
        self._lock = threading.RLock()  # of the next two
        self._is_broken_off = False
        self._cancels: dict[int, Future[Any]] = {}
        if together:
            for answer in answers.values():
                answer.add_done_callback(self._note_answer)

    def _note_answer(self, answer: Future[Any]) -> None:
        if answer.exception() is not None:
            self.break_off()

    def break_off(self) -> None:
        """End the trainer's part, and tell the receivers not to wait for each other."""
        with self._lock:
            if self._is_broken_off:
                return
            self._is_broken_off = True
            for worker_id, peer in self.push.peers.items():
                self._updater.forget(peer)
                # The member that was to pass the payload on to this one may be gone.
                if not self.answers[worker_id].done():
                    cancel = self._transport.call(peer, WorkerService.cancel_receiving)
                    self._cancels[worker_id] = cancel

    def await_answers(self, timeout_s: float) -> Collection[int]:
        """Wait for all acknowledgements.

        Returns:
            The receivers that give no sign of life, or did not acknowledge within ``timeout_s``.
        """
        answers, patience_s = self.answers, self._patience_s
        late = list(self.silent)
        slow = missing({w: answers[w] for w in answers if w not in late}, patience_s)
        # It may merely take long to receive.
        signs = {
            worker_id: self._transport.call(
                self.push.peers[worker_id], WorkerService.prepare_to_receive
            )
            for worker_id in slow
        }
        late += missing(signs, patience_s)
        if late and self.together:
            self.break_off()  # the others may wait for what a late one was to pass on
        late += missing({w: answers[w] for w in slow if w not in late}, timeout_s - patience_s)
        # Until nothing of it can disturb the next transfer to the same receivers: the end of this
        # one, on its way to a receiver that is not late, could be taken for the end of the next.
        with self._lock:  # another thread may be breaking it off
            done = [answer for worker_id, answer in answers.items() if worker_id not in late]
            if self.together and any(answer.exception() is not None for answer in done):
                self.break_off()
            cancels = {w: cancel for w, cancel in self._cancels.items() if w not in late}
        missing(cancels, patience_s)
        return late

    def watch(self) -> None:
        """Break off if a receiver falls silent before the trainer's part is over.

        Such as a stopped process, or one of a host that has vanished: its connections stay as they
        are, and the broadcast would wait for it. A ping tells it from those that wait for it.
        """
        while not self.is_sent.wait(self._patience_s):
            pings = {
                worker_id: self._transport.ping(peer)
                for worker_id, peer in self.push.peers.items()
                if not self.answers[worker_id].done()
            }
            silent = missing(pings, self._patience_s)
            if silent and not self.is_sent.is_set():
                self.silent.update(silent)
                self.break_off()
                return
