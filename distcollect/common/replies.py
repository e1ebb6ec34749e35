"""Answers of other threads, and waiting for them in a way that Ctrl-C can interrupt."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, Generic, TypeVar

K = TypeVar("K")
T = TypeVar("T")

log = logging.getLogger(__name__)

# Longest single wait of the user's thread, in seconds. A signal that arrives just as the main
# thread begins to wait is handled only when the wait ends; short waits let Ctrl-C through.
WAKEUP_INTERVAL_S = 0.5

# Code that uses a condition enters its lock (``with lock``), not the condition: entering a
# condition runs Python code, and Ctrl-C there could leave the lock taken. For the same reason the
# user's thread waits for no future of another thread, but for a Reply.


class Wakeup:
    """Wakes one thread that waits for a change. Ringing is remembered until the next wait.

    Unlike a condition it has no lock that an exception in the waiting thread could leave taken.
    """

    def __init__(self) -> None:
        self._rings: queue.SimpleQueue[None] = queue.SimpleQueue()

    def ring(self) -> None:
        """Wake the thread that waits, or let the next wait end at once."""
        if self._rings.empty():
            self._rings.put(None)

    def wait(self, timeout_s: float) -> None:
        """Wait for a ring, at most ``timeout_s``; may end earlier."""
        with contextlib.suppress(queue.Empty):
            self._rings.get(timeout=max(0.0, timeout_s))


# Held for a moment by a thread that adds a callback to a reply. The user's thread never does that.
_making_lists = threading.Lock()


class Reply(Generic[T]):
    """The answer of another thread or process, once it is there.

    It has the methods of ``concurrent.futures.Future`` that are needed here, but takes a fourth of
    its time, and is one object instead of ten: garbage collection looks at fewer. Any exception,
    such as Ctrl-C, may interrupt the thread that waits for it at any point: the thread that answers
    does not notice, and the answer can still be waited for.

    Answering and waiting take no lock. Each callback is in a list, or an attribute, until the
    thread that calls it takes it out, which only one thread can do.
    """

    __slots__ = ("_about", "_bell", "_callbacks", "_error", "_is_done", "_then", "_value")

    def __init__(self) -> None:
        """Not there yet."""
        self._is_done = False
        self._value: T | None = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[Any], object]] | None = None
        self._then: Callable[[Any, Any], object] | None = None
        self._about: Any = None  # for that
        self._bell: Wakeup | None = None  # the thread that waits for it waits for this

    @classmethod
    def of(cls, value: T) -> Reply[T]:
        """A reply that is there."""
        reply = cls()
        reply._value, reply._is_done = value, True
        return reply

    def done(self) -> bool:
        """Whether it is there."""
        return self._is_done

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Have ``callback`` called with this reply once it is there, now or on another thread."""
        with _making_lists:
            if self._callbacks is None:
                self._callbacks = []
        self._callbacks.append(callback)
        if self._is_done:
            self._call_back()

    def then(self, callback: Callable[[Any, Any], object], about: object) -> None:
        """As :meth:`add_done_callback`; ``callback`` gets ``about`` before this reply.

        It makes no object. Only one thread may call this, and only once.
        """
        self._about = about
        self._then = callback
        if self._is_done:
            self._call_back()

    def set_result(self, value: T) -> None:
        """It is there; RuntimeError if it was before."""
        self._complete(value, None)

    def set_exception(self, error: BaseException) -> None:
        """The call failed; RuntimeError if it was answered before."""
        self._complete(None, error)

    def _complete(self, value: T | None, error: BaseException | None) -> None:
        if self._is_done:
            raise RuntimeError("it was answered before")
        self._value, self._error = value, error
        self._is_done = True
        if self._bell is not None:
            self._bell.ring()
        self._call_back()

    def _call_back(self) -> None:
        try:
            then = self._then
            if then is not None:
                del self._then
        except AttributeError:  # it was taken before, perhaps by another thread
            then = None
        if then is not None:
            about, self._about = self._about, None
            try:
                then(about, self)
            except Exception:
                log.exception("a callback of a reply raised")
        callbacks = self._callbacks
        while callbacks:
            try:
                callback = callbacks.pop(0)
            except IndexError:  # another thread took the last one
                return
            try:
                callback(self)
            except Exception:
                log.exception("a callback of a reply raised")

    def arrives(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` on one thread; whether it is there."""
        if not self._is_done and self._bell is None:
            self._bell = Wakeup()
        deadline = time.monotonic() + timeout_s
        while not self._is_done:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return False
            assert self._bell is not None
            self._bell.wait(min(remaining, WAKEUP_INTERVAL_S))
        return True

    def exception(self, timeout_s: float = 0) -> BaseException | None:
        """The error, if the call failed; waits as :meth:`result` does."""
        if not self._is_done:
            self._wait(timeout_s)
        return self._error

    def result(self, timeout_s: float = 0) -> T:
        """The value, or raise the error.

        Waits up to ``timeout_s`` seconds. TimeoutError if it isn't there then.
        """
        if not self._is_done:
            self._wait(timeout_s)
        if self._error is not None:
            # Without the frames of an earlier raise, which its traceback keeps alive.
            raise self._error.with_traceback(None)
        return self._value  # type: ignore[return-value]

    def _wait(self, timeout_s: float) -> None:
        if not self.arrives(timeout_s):
            raise TimeoutError(f"no reply within {timeout_s} s")


def answer(reply: Future[T] | Reply[T], function: Callable[..., T], *args: Any) -> None:
    """Call ``function``; ``reply`` gets what it returns or raises."""
    try:
        result = function(*args)
    except Exception as error:  # noqa: BLE001 - it is raised where the reply is waited for
        reply.set_exception(error)
    else:
        reply.set_result(result)


class Replies(Generic[K, T]):
    """The results of several futures of other threads, for the user's thread to wait for."""

    def __init__(self, futures: Mapping[K, Future[T]]) -> None:
        """Wait for ``futures``; the user's thread must not make this."""
        self.by_key: dict[K, Reply[T]] = {key: Reply() for key in futures}
        for key, future in futures.items():
            future.add_done_callback(partial(_pass_on, self.by_key[key]))

    def missing(self, timeout_s: float) -> list[K]:
        """Wait up to ``timeout_s`` for all; the keys of those that did not come."""
        deadline = time.monotonic() + timeout_s
        return [
            key
            for key, reply in self.by_key.items()
            if not reply.arrives(deadline - time.monotonic())
        ]

    def errors(self) -> dict[K, BaseException]:
        """The errors that came, by key."""
        return {
            key: error
            for key, reply in self.by_key.items()
            if reply.done() and (error := reply.exception()) is not None
        }


def _pass_on(reply: Reply[T], future: Future[T]) -> None:
    error = future.exception()
    if error is None:
        reply.set_result(future.result())
    else:
        reply.set_exception(error)


def arrives(answer: Future[Any], timeout_s: float) -> bool:
    """Wait up to ``timeout_s`` for ``answer``; whether it came (a result or an error)."""
    deadline = time.monotonic() + timeout_s
    while not wait([answer], max(0.0, min(deadline - time.monotonic(), WAKEUP_INTERVAL_S))).done:
        if time.monotonic() >= deadline:
            return False
    return True


def missing(answers: Mapping[K, Future[Any]], timeout_s: float) -> list[K]:
    """Wait up to ``timeout_s`` for all of ``answers``; the keys of those that did not come."""
    deadline = time.monotonic() + timeout_s
    return [
        key for key, answer in answers.items() if not arrives(answer, deadline - time.monotonic())
    ]
