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

    def break_off_at_errors(self) -> None:
        """Break off as soon as a receiver fails."""

        def answered(answer: Future[Any]) -> None:
            if answer.exception() is not None:
                self.break_off()

        for answer in self.answers.values():
            answer.add_done_callback(answered)

    def break_off(self) -> None:
        """End the trainer's part, and tell the receivers not to wait for each other."""
        with self._lock:
            if self._is_broken_off:
                return
            self._is_broken_off = True
            for worker_id, peer in self.push.receivers.items():
                self._updater.forget(peer)
                # The member that was to pass the payload on to this one may be gone.
                if not self.answers[worker_id].done():
                    cancel = self._transport.call(peer, WorkerService.cancel_receiving)
                    self._cancels[worker_id] = cancel

    def end(self, late: Collection[int]) -> None:
        """Wait until nothing of it can disturb the next transfer to the same receivers.

        Else the end of this one, on its way to a receiver that is not late, could be taken for the
        end of the next one.
        """
        with self._lock:  # another thread may be breaking it off
            if any(w not in late and a.exception() is not None for w, a in self.answers.items()):
                self.break_off()
            cancels = {w: cancel for w, cancel in self._cancels.items() if w not in late}
        missing(cancels, self._patience_s)

    def watch(self) -> None:
        """Break off if a receiver falls silent before the trainer's part is over.

        Such as a stopped process, or one of a host that has vanished: its connections stay as they
        are, and the broadcast would wait for it. A ping tells it from those that wait for it.
        """
        while not self.is_sent.wait(self._patience_s):
            pings = {
                worker_id: self._transport.ping(peer)
                for worker_id, peer in self.push.receivers.items()
                if not self.answers[worker_id].done()
            }
            silent = missing(pings, self._patience_s)
            if silent and not self.is_sent.is_set():
                self.silent.update(silent)
                self.break_off()
                return
