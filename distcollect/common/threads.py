"""A thread that does one job after the other."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import Any, TypeVar

K = TypeVar("K")
T = TypeVar("T")

# Python misses a signal that comes while its main thread gives up the interpreter lock to wait: it
# is seen only when the wait ends. So that Ctrl-C works, no wait of the user's thread is longer.
LOOK_UP_S = 0.5

# Where a condition is used, its lock is what is entered: ``with condition`` goes through a method
# written in Python, and Ctrl-C between its taking the lock and its return would leave it locked.


class SerialThread:
    """Runs what is submitted, in order.

    Unlike a ``ThreadPoolExecutor``'s it is a daemon: the interpreter's exit doesn't wait for a job
    that waits for a peer.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, function: Callable[..., T], *args: Any) -> Future[T]:
        """Call ``function`` after all that was submitted before; its result as a future."""
        answer: Future[T] = Future()
        self._jobs.put((answer, lambda: function(*args)))
        return answer

    def close(self) -> None:
        """End after what was submitted; doesn't wait for it."""
        self._jobs.put(None)

    def _run(self) -> None:
        do_jobs(self._jobs)


def do_jobs(
    jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None],
) -> None:
    """Do jobs on the calling thread until a None; the outcome of each is its future's."""
    while (job := jobs.get()) is not None:
        answer, work = job
        try:
            answer.set_result(work())
        except Exception as error:  # noqa: BLE001 - it is raised where the future is waited for
            answer.set_exception(error)


def arrives(answer: Future[Any], timeout_s: float) -> bool:
    """Wait up to ``timeout_s`` for ``answer``; whether it is there (a result or an error)."""
    deadline = time.monotonic() + timeout_s
    while not wait([answer], max(0.0, min(deadline - time.monotonic(), LOOK_UP_S))).done:
        if time.monotonic() >= deadline:
            return False
    return True


def missing(answers: Mapping[K, Future[Any]], timeout_s: float) -> list[K]:
    """Wait up to ``timeout_s`` for all of ``answers``; whose are not there then."""
    deadline = time.monotonic() + timeout_s
    return [
        key for key, answer in answers.items() if not arrives(answer, deadline - time.monotonic())
    ]
