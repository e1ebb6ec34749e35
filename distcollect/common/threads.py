"""Threads that do one job after the other, and waiting for answers so that Ctrl-C works."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import Any, TypeVar

K = TypeVar("K")
T = TypeVar("T")

# Longest single wait of the user's thread, in seconds. A signal that arrives just as the main
# thread begins to wait is handled only when the wait ends; short waits let Ctrl-C through.
LOOK_UP_S = 0.5

# Code that uses a condition enters its lock (``with lock``), not the condition: entering a
# condition runs Python code, and Ctrl-C there could leave the lock taken.


class SerialThread:
    """Runs what is submitted, in order.

    It is a daemon thread, unlike a ``ThreadPoolExecutor``'s, so a job that waits for a peer doesn't
    delay the interpreter's exit.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, function: Callable[..., T], *args: Any) -> Future[T]:
        """Call ``function`` after all that was submitted before; its result as a future."""

        def call() -> T:
            try:
                return function(*args)
            except Exception:
                raise
            except BaseException as error:  # such as SystemExit, which would end the thread
                raise RuntimeError(f"{function!r} raised {error!r}") from error

        answer: Future[T] = Future()
        self._jobs.put((answer, call))
        return answer

    def close(self) -> None:
        """End after all submitted jobs; doesn't wait for them."""
        self._jobs.put(None)

    def _run(self) -> None:
        do_jobs(self._jobs)


def do_jobs(
    jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None],
) -> None:
    """Do jobs on the calling thread until a None; each job's result or error goes to its future."""
    while (job := jobs.get()) is not None:
        answer, work = job
        try:
            answer.set_result(work())
        except Exception as error:  # noqa: BLE001 - it is raised where the future is waited for
            answer.set_exception(error)


def arrives(answer: Future[Any], timeout_s: float) -> bool:
    """Wait up to ``timeout_s`` for ``answer``; whether it came (a result or an error)."""
    deadline = time.monotonic() + timeout_s
    while not wait([answer], max(0.0, min(deadline - time.monotonic(), LOOK_UP_S))).done:
        if time.monotonic() >= deadline:
            return False
    return True


def missing(answers: Mapping[K, Future[Any]], timeout_s: float) -> list[K]:
    """Wait up to ``timeout_s`` for all of ``answers``; the keys of those that did not come."""
    deadline = time.monotonic() + timeout_s
    return [
        key for key, answer in answers.items() if not arrives(answer, deadline - time.monotonic())
    ]
