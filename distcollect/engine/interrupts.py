"""What other threads ask of the thread that collects, between two steps."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from distcollect.common import signals


class Stopped(Exception):
    """Collection was ended by :meth:`~distcollect.engine.engine.Engine.stop`."""


class Interrupts:
    """Requests of other threads that take effect between two steps.

    :meth:`stop`, :meth:`preempt` and :meth:`add_job` may be called from any thread; all else
    belongs to the thread that collects.

    Attributes:
        pending: there is something to do before the next step, see :meth:`handle`. The hot loop
            reads it without the lock.
        on_request: called by :meth:`stop`, :meth:`preempt` and :meth:`add_job`, after that.
    """

    def __init__(self) -> None:
        self.pending = False
        self.on_request: Callable[[], object] = lambda: None
        self._is_stopped = False
        self._is_collecting = False
        self._number = -1  # of the rollout that is collected, or was the last one
        self._preempted: set[int] = set()  # rollouts that end early; they may be still to begin
        self._jobs: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()  # of all five

    def wake(self) -> None:
        """Have the next :meth:`handle` raise what a signal asked for; for its handler."""
        # Without the lock, which the thread may hold that the handler runs on. If this is
        # overwritten, the handler of Ctrl-C does it again.
        self.pending = True

    def stop(self) -> None:
        """Make the running or next :meth:`handle` raise :class:`Stopped`."""
        with self._lock:
            self._is_stopped = self.pending = True
        self.on_request()

    def preempt(self, number: int | None = None) -> None:
        """End a rollout early.

        ``number``: which one. If it is still to begin, it ends once it has a frame; if it is over,
        nothing happens. None: the running one, if one runs.
        """
        with self._lock:
            if number is not None or self._is_collecting:
                self._preempted.add(self._number if number is None else number)
            if self._is_ending:
                self.pending = True
        self.on_request()

    def add_job(self, job: Callable[[], None]) -> None:
        """Run ``job`` before the next step, or in the next :meth:`run_jobs`."""
        with self._lock:
            self._jobs.append(job)
            self.pending = True
        self.on_request()

    def run_jobs(self) -> None:
        """Run what :meth:`add_job` was given."""
        while self._jobs:
            self._jobs.popleft()()

    def rollout_begins(self, number: int | None = None) -> None:
        """The rollout with this number begins; numbers grow. None: the next number."""
        with self._lock:
            self._number = self._number + 1 if number is None else number
            self._is_collecting = True
            self._update()

    def rollout_ended(self) -> None:
        """The rollout is over, complete or not."""
        with self._lock:
            self._is_collecting = False
            self._preempted = {number for number in self._preempted if number > self._number}
            self._update()

    def handle(self) -> bool:
        """Run the jobs; whether the rollout is to end as soon as it has a frame.

        Raises:
            Stopped: see :meth:`stop`.
            KeyboardInterrupt, Interrupted: a signal came, see :func:`.signals.check`.
        """
        signals.check()
        if self._is_stopped:
            raise Stopped
        self.run_jobs()
        with self._lock:
            self._update()
            return self._is_ending

    @property
    def _is_ending(self) -> bool:
        return self._is_collecting and self._number in self._preempted

    def _update(self) -> None:
        self.pending = self._is_stopped or self._is_ending or bool(self._jobs)
