"""Hands the core of the pool one event at a time."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from distcollect.common import signals
from distcollect.errors import CollectorStateError

T = TypeVar("T")

# For a signal's handler: who has the lock may wait for what the handler interrupted.
_HANDLER_TIMEOUT_S = 2.0


class EventLoop:
    """The pool's only lock, and the queue of its events.

    Attributes:
        lock: protects the core. It is reentrant, as an answer may come before the call that asks
            for it returns; no event enters the core while the core handles another.
    """

    def __init__(self, fail: Callable[[BaseException], None], decide: Callable[[], object]) -> None:
        """Start without events.

        Args:
            fail: ends the run, after an error in the pool itself.
            decide: called whenever all events are handled, as one more.
        """
        self.lock = threading.RLock()
        self._is_handling = False
        self._fail, self._decide = fail, decide
        self._events: deque[tuple[Any, ...]] = deque()  # see post()

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Hold the lock within.

        Raises:
            CollectorStateError: a signal's handler would perhaps wait for ever.
        """
        if not self.lock.acquire(blocking=False):
            limit_s = _HANDLER_TIMEOUT_S if signals.interrupts_us() else -1
            if not self.lock.acquire(timeout=limit_s):
                raise CollectorStateError(
                    "the handler of a signal has interrupted a call of the collector, which holds "
                    "what this needs: note the signal there, and look between two batches"
                )
        try:
            yield
        finally:
            self.lock.release()

    def post(self, *event: Any) -> None:
        """Have the core handle an event, after those that came before.

        If another thread handles events now, it handles this one too. A thread that holds the lock
        finds it handled when this returns, unless it is within an event.

        Args:
            event: a function and its arguments; one tuple, as many events may wait.
        """
        self._events.append(event)
        # Else the thread that handles events sees it: it looks once more after it has ended.
        if not self._is_handling:
            with self.lock:
                self._drain()

    def do(self, event: Callable[..., T], *args: Any) -> T:
        """Have the core handle an event of the user's thread now; return what that returns."""
        with self.lock:
            was_handling, self._is_handling = self._is_handling, True
            try:
                return event(*args)
            finally:
                self._is_handling = was_handling
                self._drain()

    def _drain(self) -> None:
        """Handle all events, one after the other.

        A transport may answer before its method returns: that answer is an event like any other.
        """
        if self._is_handling:
            return
        is_done = False
        while not is_done:
            self._is_handling = True
            try:
                while self._events:
                    event = self._events.popleft()
                    event[0](*event[1:])
                self._decide()
            except Exception as error:
                self._fail(error)
                raise
            finally:
                self._is_handling = False
            is_done = not self._events
