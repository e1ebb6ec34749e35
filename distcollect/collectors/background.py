"""Collects batches on a thread of its own."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator

from distcollect.collectors.replay import RateLimited
from distcollect.common import signals
from distcollect.common.signals import WAKEUP_INTERVAL_S
from distcollect.common.waiting import wait_for
from distcollect.errors import CollectorStateError, DeadlineError

log = logging.getLogger(__name__)

# For a thread that was told to end, and whose workers are gone.
JOIN_TIMEOUT_S = 10.0


class Background:
    """A thread that calls ``collect`` repeatedly, until it is stopped or there are no more batches.

    Attributes:
        error: the error that ended it; None: none did.
    """

    def __init__(self, collect: Callable[[], bool | None], limit: RateLimited | None) -> None:
        """Prepare the thread; :meth:`begin` starts it.

        Args:
            collect: collects one batch; returns True if there are more.
            limit: the buffer, if it limits when a batch may be added.
        """
        self.error: BaseException | None = None
        self._collect = collect
        self._limit = limit
        self._changed = threading.Condition()  # of these three
        self._is_collecting = False
        self._num_pauses = 0  # that last, or that threads wait for
        self._stop_requested = False
        self._thread = threading.Thread(target=self._run, name="distcollect-collect", daemon=True)

    def begin(self) -> None:
        """Start the thread."""
        if self._limit is not None:
            self._limit.begin()
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Return True if the thread runs, be it that it collects, waits or is paused."""
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            while self._collects_one():
                pass
        except BaseException as error:
            # At exit it is not told to stop first.
            is_told = self._stop_requested or not threading.main_thread().is_alive()
            if is_told and isinstance(error, CollectorStateError):
                # It was shut down, which is no failure.
                log.debug("collecting in the background ended: %s", error)
            else:
                log.exception("collecting in the background ended")
                self.error = error
        finally:
            if self._limit is not None:
                self._limit.end(self.error)

    def _collects_one(self) -> bool:
        """Collect a batch once that may be; return True if there is more to collect."""
        with self._changed:
            self._changed.wait_for(lambda: self._stop_requested or not self._num_pauses)
        if self._limit is not None:
            self._limit.wait_to_insert(self._may_collect)
        with self._changed:
            self._is_collecting = self._may_collect()
        if not self._is_collecting:
            return not self._stop_requested  # else it was paused meanwhile
        try:
            return bool(self._collect())
        finally:
            with self._changed:
                self._is_collecting = False
                self._changed.notify_all()

    def _may_collect(self) -> bool:
        return not (self._stop_requested or self._num_pauses)

    @contextlib.contextmanager
    def paused(self, timeout_s: float) -> Iterator[None]:
        """Collect nothing within; a batch that is being collected is finished first.

        Raises, on entering:
            DeadlineError: it was not finished within ``timeout_s``.
        """
        with self._changed:
            self._num_pauses += 1
        try:
            is_own = threading.current_thread() is self._thread  # a hook, or the user's buffer
            is_idle = wait_for(self._changed, lambda: is_own or not self._is_collecting, timeout_s)
            if not is_idle:
                raise DeadlineError(
                    f"pause() waited {timeout_s:g} s for the batch that is being collected; give "
                    "it a longer timeout_s"
                )
            yield
        finally:
            with self._changed:
                self._num_pauses -= 1
                self._changed.notify_all()

    def stop(self) -> None:
        """Begin no other batch."""
        with self._changed:
            self._stop_requested = True
            self._changed.notify_all()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread's end; return True if it has ended, or never began."""
        if self._thread is threading.current_thread():  # the user's buffer shuts the collector down
            return False
        deadline = time.monotonic() + timeout_s
        while self.is_alive and (remaining := deadline - time.monotonic()) > 0:
            signals.check()
            self._thread.join(min(remaining, WAKEUP_INTERVAL_S))
        return not self.is_alive
