"""Threads that start once or do one job after the other; waiting that Ctrl-C can interrupt."""

from __future__ import annotations

import _thread
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, Generic, TypeVar

K = TypeVar("K")
T = TypeVar("T")

# Longest single wait of the user's thread, in seconds. A signal that arrives just as the main
# thread begins to wait is handled only when the wait ends; short waits let Ctrl-C through.
LOOK_UP_S = 0.5

# Code that uses a condition enters its lock (``with lock``), not the condition: entering a
# condition runs Python code, and Ctrl-C there could leave the lock taken. For the same reason the
# user's thread waits for no future of another thread, but for an Answer.


class Bell:
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


class Answer(Generic[T]):
    """What another thread answers to the user's thread.

    Any exception, such as Ctrl-C, may interrupt the wait at any point: the thread that answers does
    not notice, and the answer can still be waited for.
    """

    def __init__(self) -> None:
        self._bell = Bell()
        self._outcome: tuple[T, None] | tuple[None, BaseException] | None = None

    def set(self, value: T) -> None:
        """Answer with ``value``."""
        self._outcome = value, None
        self._bell.ring()

    def fail(self, error: BaseException) -> None:
        """Answer with an error."""
        self._outcome = None, error
        self._bell.ring()

    @property
    def done(self) -> bool:
        """Whether it was answered."""
        return self._outcome is not None

    @property
    def error(self) -> BaseException | None:
        """The error that it was answered with, if that is so."""
        outcome = self._outcome
        return None if outcome is None else outcome[1]

    def arrives(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s``; whether it was answered."""
        deadline = time.monotonic() + timeout_s
        while self._outcome is None:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return False
            self._bell.wait(min(remaining, LOOK_UP_S))
        return True

    def result(self) -> T:
        """The value, or raise the error; only once it was answered."""
        assert self._outcome is not None
        value, error = self._outcome
        if error is not None:
            # Without the frames of an earlier raise, which its traceback keeps alive.
            raise error.with_traceback(None)
        return value  # type: ignore[return-value]


class Answers(Generic[K, T]):
    """The results of several futures of other threads, for the user's thread to wait for."""

    def __init__(self, futures: Mapping[K, Future[T]]) -> None:
        """Wait for ``futures``; the user's thread must not make this."""
        self.by_key: dict[K, Answer[T]] = {key: Answer() for key in futures}
        for key, future in futures.items():
            future.add_done_callback(partial(_pass_on, self.by_key[key]))

    def missing(self, timeout_s: float) -> list[K]:
        """Wait up to ``timeout_s`` for all; the keys of those that did not come."""
        deadline = time.monotonic() + timeout_s
        return [
            key
            for key, answer in self.by_key.items()
            if not answer.arrives(deadline - time.monotonic())
        ]

    def errors(self) -> dict[K, BaseException]:
        """The errors that came, by key."""
        return {
            key: error for key, answer in self.by_key.items() if (error := answer.error) is not None
        }


def _pass_on(answer: Answer[T], future: Future[T]) -> None:
    error = future.exception()
    if error is None:
        answer.set(future.result())
    else:
        answer.fail(error)


class SingleThread:
    """A daemon thread that starts once, however often :meth:`start` is called or interrupted."""

    def __init__(self, target: Callable[[], object], name: str) -> None:
        """Prepare the thread; it is to run ``target``."""
        self._thread = threading.Thread(target=target, name=name, daemon=True)
        self._only_one = threading.Lock()

    def start(self) -> None:
        """Start it, if it was neither started nor prevented. Doesn't wait until it runs."""
        # Thread.start() waits for a condition, which an exception such as Ctrl-C's may break.
        _thread.start_new_thread(self._start, ())

    def _start(self) -> None:
        if self._only_one.acquire(blocking=False):
            self._thread.start()

    def prevent(self) -> bool:
        """Let it never start; returns whether it was not started before."""
        return self._only_one.acquire(blocking=False)

    @property
    def is_current(self) -> bool:
        """Whether the calling thread is this one."""
        return threading.current_thread() is self._thread


class SerialThread:
    """Runs what is submitted, in order.

    It is a daemon thread, unlike a ``ThreadPoolExecutor``'s, so a job that waits for a peer doesn't
    delay the interpreter's exit.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[
            tuple[Future[Any] | Answer[Any], Callable[[], Any]] | None
        ] = queue.SimpleQueue()
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

    def ask(self, function: Callable[..., T], *args: Any) -> Answer[T]:
        """As :meth:`submit`, for the user's thread: one call in C hands the job over."""
        answer: Answer[T] = Answer()
        self._jobs.put((answer, partial(function, *args)))
        return answer

    def close(self) -> None:
        """End after all submitted jobs; doesn't wait for them."""
        self._jobs.put(None)

    @property
    def is_alive(self) -> bool:
        """Whether it still does jobs."""
        return self._thread.is_alive()

    @property
    def is_current(self) -> bool:
        """Whether the calling thread is this one."""
        return threading.current_thread() is self._thread

    def _run(self) -> None:
        do_jobs(self._jobs)


def do_jobs(
    jobs: queue.SimpleQueue[Any],
) -> None:
    """Do jobs on the calling thread until a None.

    A job is a pair: a :class:`Future` or an :class:`Answer` for its result or error, and a function
    without arguments.
    """
    while (job := jobs.get()) is not None:
        _do(*job)
        del job  # else it would live until the next one comes


def _do(answer: Future[Any] | Answer[Any], work: Callable[[], Any]) -> None:
    done, failed = (
        (answer.set, answer.fail)
        if isinstance(answer, Answer)
        else (answer.set_result, answer.set_exception)
    )
    try:
        result = work()
    except Exception as error:  # noqa: BLE001 - it is raised where the answer is waited for
        failed(error)
    else:
        done(result)


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
