"""Answers of peers that a transport still waits for."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import Any

from distcollect.errors import WorkerLost
from distcollect.transport.failure import Failure
from distcollect.transport.protocol import Deliver

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class PendingAnswer:
    """An answer of ``peer``; once it is there, ``deliver`` is called with it."""

    peer: int
    deliver: Deliver


class PendingAnswers:
    """The answers that have not come yet, so that those of a disconnected peer can be failed."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.open: set[PendingAnswer] = set()

    def expect(self, peer: int, deliver: Deliver) -> PendingAnswer:
        """Note that an answer of ``peer`` is pending, and return it."""
        answer = PendingAnswer(peer, deliver)
        with self._changed:
            self.open.add(answer)
        return answer

    def complete(
        self, answer: PendingAnswer, value: Any = None, error: BaseException | None = None
    ) -> None:
        """Complete ``answer`` with a value or an error, unless :meth:`fail` did already.

        A Failure, in which errors travel, is an error.
        """
        if isinstance(value, Failure):
            value, error = None, value.error()
        with self._changed:
            if answer not in self.open:
                return
            self.open.remove(answer)
            if not self.open:
                self._changed.notify_all()
        try:
            answer.deliver(value, error)
        except Exception:
            log.exception("what was to be done with an answer raised")

    def fail(self, peer: int) -> None:
        """Fail all answers of ``peer`` with :class:`WorkerLost`."""
        with self._changed:
            answers = [answer for answer in self.open if answer.peer == peer]
        for answer in answers:
            self.complete(answer, error=peer_is_gone(peer))

    def wait_for_all(self, timeout_s: float) -> None:
        """Wait up to ``timeout_s`` for all answers."""
        with self._changed:
            self._changed.wait_for(lambda: not self.open, timeout_s)


def peer_is_gone(peer: int, cause: BaseException | None = None) -> WorkerLost:
    """Return the error of an answer that will never come."""
    error = WorkerLost(f"peer {peer} is gone: its answer will never come")
    error.__cause__ = cause
    return error
