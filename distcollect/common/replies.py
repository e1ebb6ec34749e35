"""Answers of other threads and processes, and waiting for them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from distcollect.common.signals import Wakeup

K = TypeVar("K")
T = TypeVar("T")

log = logging.getLogger(__name__)

_lock = threading.Lock()  # of all replies; held for a moment


class Reply(Generic[T]):
    """The answer of another thread or process, once it is there.

    It has the methods of ``concurrent.futures.Future`` that are needed here, but takes a fourth of
    its time, and is one object instead of ten: garbage collection looks at fewer.
    """

    __slots__ = ("_about", "_callbacks", "_error", "_is_done", "_then", "_value")

    def __init__(self) -> None:
        """Not there yet."""
        self._is_done = False
        self._value: T | None = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[Any], object]] | None = None
        self._then: Callable[[Any, Any], object] | None = None
        self._about: Any = None  # for that

    @classmethod
    def of(cls, value: T) -> Reply[T]:
        """Return a reply that is there."""
        reply = cls()
        reply._value, reply._is_done = value, True
        return reply

    def done(self) -> bool:
        """Return True if it is there."""
        return self._is_done

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Have ``callback`` called with this reply once it is there, now or on another thread."""
        with _lock:
            if not self._is_done:
                self._callbacks = [*(self._callbacks or ()), callback]
                return
        _call(callback, self)

    def then(self, callback: Callable[[Any, Any], object], about: object) -> None:
        """As :meth:`add_done_callback`; ``callback`` gets ``about`` before this reply.

        It makes no object. It may be called once.
        """
        with _lock:
            if not self._is_done:
                self._then, self._about = callback, about
                return
        _call(callback, about, self)

    def set_result(self, value: T) -> None:
        """Answer; RuntimeError if it was answered before."""
        self._complete(value, None)

    def set_exception(self, error: BaseException) -> None:
        """Answer that the call failed; RuntimeError if it was answered before."""
        self._complete(None, error)

    def _complete(self, value: T | None, error: BaseException | None) -> None:
        with _lock:
            if self._is_done:
                raise RuntimeError("it was answered before")
            self._value, self._error, self._is_done = value, error, True
        if self._then is not None:
            then, about, self._then, self._about = self._then, self._about, None, None
            _call(then, about, self)
        if self._callbacks is not None:
            callbacks, self._callbacks = self._callbacks, None
            for callback in callbacks:
                _call(callback, self)

    def exception(self, timeout_s: float = 0) -> BaseException | None:
        """Return the error, if the call failed; waits as :meth:`result` does."""
        self._wait(timeout_s)
        return self._error

    def result(self, timeout_s: float = 0) -> T:
        """Return the value, or raise the error.

        Waits up to ``timeout_s`` seconds. TimeoutError if it isn't there then.
        """
        self._wait(timeout_s)
        if self._error is not None:
            # Without the frames of an earlier raise, which its traceback keeps alive.
            raise self._error.with_traceback(None)
        return self._value  # type: ignore[return-value]

    def _wait(self, timeout_s: float) -> None:
        if not (self._is_done or arrives(self, timeout_s)):
            raise TimeoutError(f"no reply within {timeout_s} s")


def _call(callback: Callable[..., object], *args: object) -> None:
    try:
        callback(*args)
    except Exception:
        log.exception("a callback of a reply raised")


def answer(reply: Future[T] | Reply[T], function: Callable[..., T], *args: Any) -> None:
    """Call ``function``; ``reply`` gets what it returns or raises."""
    try:
        result = function(*args)
    except Exception as error:  # noqa: BLE001 - it is raised where the reply is waited for
        reply.set_exception(error)
    else:
        reply.set_result(result)


def arrives(answer: Future[Any] | Reply[Any], timeout_s: float) -> bool:
    """Wait up to ``timeout_s`` for ``answer``; return True if it came (a result or an error)."""
    if answer.done():
        return True
    wakeup = Wakeup()
    answer.add_done_callback(lambda _: wakeup.ring())
    return wakeup.wait_until(answer.done, timeout_s)


def missing(answers: Mapping[K, Future[Any]], timeout_s: float) -> list[K]:
    """Wait up to ``timeout_s`` for all ``answers``; return the keys of those that are missing."""
    deadline = time.monotonic() + timeout_s
    return [
        key for key, answer in answers.items() if not arrives(answer, deadline - time.monotonic())
    ]
