"""Ends what collectors started, on a thread of its own.

An exception in the user's thread, such as Ctrl-C's, does not break off what that thread does. And a
collector that nobody refers to may be finalized by the garbage collector in any thread, at any
moment, while that thread holds any lock: the finalizer only puts a job into a queue.
"""

from __future__ import annotations

import atexit
import logging
import os
import weakref
from collections.abc import Callable
from concurrent.futures import Future

from distcollect.common.forks import Owner
from distcollect.common.threads import SerialThread
from distcollect.common.waiting import arrives
from distcollect.errors import DeadlineError

log = logging.getLogger(__name__)

_threads: dict[int, SerialThread] = {}  # by process id: a forked process has none of its parent's
_open: set[Finalizer] = set()


def _thread() -> SerialThread:
    pid = os.getpid()
    if pid not in _threads:
        _threads[pid] = SerialThread("distcollect-closing")
    return _threads[pid]


class Finalizer:
    """Calls a function once: when it is told to, when an owner is gone, or at exit."""

    def __init__(self, owner: object, close: Callable[[], None], limit_s: float) -> None:
        """Wait for that.

        Args:
            owner: is closed; ``close`` must not refer to it.
            close: closes it; takes no longer than ``limit_s``.
            limit_s: seconds.
        """
        self._close = close
        self._limit_s = limit_s
        self._thread = _thread()
        self._owner = Owner()
        self._has_begun = False
        self._answer: Future[None] = Future()
        _open.add(self)
        self.add_owner(owner)

    def add_owner(self, owner: object) -> None:
        """Close also when ``owner`` is gone, to which ``close`` must not refer either."""
        # At exit, which nobody waits for here, _close_all() does it. In a forked child the thread
        # does not run.
        weakref.finalize(owner, self._thread.put, self._run).atexit = False

    def __call__(self) -> None:
        """Close, and wait until that is done; again: wait for the same.

        Raises:
            DeadlineError: it is not done in time; it goes on.
            Exception: what the function raised.
        """
        if not self._owner.is_here:
            return  # the parent closes it
        if self._thread.is_current:
            self._run()  # from what is being closed
            return
        self._thread.put(self._run)  # again, there is nothing left to do
        if not arrives(self._answer, self._limit_s):
            raise DeadlineError(
                f"what the collector started did not end within {self._limit_s:g} s; it is still "
                "being ended in the background"
            )
        self._answer.result()

    def _run(self) -> None:
        if self._has_begun:
            return
        self._has_begun = True
        try:
            self._close()
        except Exception as error:
            log.debug("closing a collector failed", exc_info=True)
            self._answer.set_exception(error)
        else:
            self._answer.set_result(None)
        finally:
            _open.discard(self)


def close_later(close: Callable[[], object]) -> None:
    """Close what a collector held that nobody refers to any more; for ``__del__``."""
    _thread().put(close)


def forgotten_closings(limit_s: float) -> None:
    """Wait until collectors that nobody refers to are closed, at most ``limit_s``."""
    arrives(_thread().submit(lambda: None), limit_s)


def _close_all() -> None:
    """At exit: close what is open."""
    for closing in list(_open):
        try:
            closing()
        except Exception:
            log.exception("closing a collector at exit failed")


def close_first_at_exit() -> None:
    """At exit, close what is open before all that was imported until now ends, such as Ray."""
    atexit.unregister(_close_all)
    atexit.register(_close_all)


close_first_at_exit()
