"""Answers of peers that a transport still waits for."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any, TypeAlias, TypeVar

from distcollect.common.replies import Reply
from distcollect.errors import WorkerLost

PendingAnswer: TypeAlias = Future[Any] | Reply[Any]
AnyAnswer = TypeVar("AnyAnswer", Future[Any], Reply[Any])


class PendingAnswers:
    """The answers that have not come yet, so that those of a disconnected peer can be failed."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._peers: dict[PendingAnswer, int] = {}

    def expect(self, peer: int, answer: AnyAnswer) -> AnyAnswer:
        """Note that this answer of ``peer`` is pending, and return it."""
        with self._lock:
            self._peers[answer] = peer
        return answer

    @property
    def open(self) -> list[PendingAnswer]:
        """The answers that are still pending."""
        with self._lock:
            return list(self._peers)

    def complete(
        self, answer: PendingAnswer, value: Any = None, error: BaseException | None = None
    ) -> None:
        """Complete ``answer`` with a value or an error, unless :meth:`fail` did already."""
        with self._lock:
            if self._peers.pop(answer, None) is None:
                return
            if not self._peers:
                self._changed.notify_all()
        if error is None:
            answer.set_result(value)
        else:
            answer.set_exception(error)

    def fail(self, peer: int) -> None:
        """Fail all answers of ``peer`` with :class:`WorkerLost`."""
        with self._lock:
            answers = [answer for answer, owner in self._peers.items() if owner == peer]
        for answer in answers:
            self.complete(answer, error=peer_is_gone(peer))

    def wait_for_all(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` for all answers; return whether all came."""
        with self._lock:
            return self._changed.wait_for(lambda: not self._peers, timeout_s)


def peer_is_gone(peer: int, cause: BaseException | None = None) -> WorkerLost:
    """Return the error of an answer that will never come."""
    error = WorkerLost(f"peer {peer} is gone: its answer will never come")
    error.__cause__ = cause
    return error
