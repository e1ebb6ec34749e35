"""Threads that do one job, or one after the other."""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from distcollect.common.forks import only_here
from distcollect.common.waiting import answer

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger(__name__)


def run_aside(function: Callable[..., object], *args: object) -> threading.Thread | None:
    """Call a function on a daemon thread of its own; the thread.

    If no thread can be started, it is called on the calling thread, and None is returned: from
    Python 3.12 on that is so in functions that are called at exit.
    """
    thread = threading.Thread(target=function, args=args, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        function(*args)
        return None
    return thread


class BeforeExit:
    """Calls of daemon threads that the interpreter's exit waits for.

    Most calls of torch, and the destructors of its process groups, give the interpreter's lock up
    and take it again. If the interpreter shuts down in between, the latter ends the thread, which
    C++ answers by aborting the process: "terminate called without an active exception".
    """

    def __init__(self, timeout_s: float) -> None:
        """The exit waits for ``timeout_s`` at most."""
        self._timeout_s = timeout_s
        # Without a lock, which a forked child could inherit: each side writes first, then reads.
        self._under_way: set[object] = set()
        self._is_exiting = False
        atexit.register(only_here(self._exit))

    def do(self, function: Callable[[], object]) -> bool:
        """Call a function; False: it is too late, and it was not called."""
        call = object()
        self._under_way.add(call)
        try:
            if self._is_exiting:
                return False
            function()
        finally:
            self._under_way.discard(call)
        return True

    def _exit(self) -> None:
        self._is_exiting = True
        deadline = time.monotonic() + self._timeout_s
        while self._under_way and time.monotonic() < deadline:
            time.sleep(0.001)


class SerialThread:
    """Runs what is submitted, in order.

    It is a daemon thread, unlike a ``ThreadPoolExecutor``'s, so a job that waits for a peer doesn't
    delay the interpreter's exit.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=do_jobs, args=(self._jobs,), name=name, daemon=True)
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

        future: Future[T] = Future()
        self._jobs.put(partial(answer, future, call))
        return future

    def put(self, job: Callable[[], object]) -> None:
        """As :meth:`submit`, without an answer: if the job raises, that is logged.

        It is one call in C, which takes no lock of Python's: a finalizer may call it anywhere.
        """
        self._jobs.put(job)

    def close(self) -> None:
        """End after all submitted jobs; doesn't wait for them."""
        self._jobs.put(None)

    @property
    def is_current(self) -> bool:
        """Return True if the calling thread is this one."""
        return threading.current_thread() is self._thread


def do_jobs(jobs: queue.SimpleQueue[Callable[[], object] | None]) -> None:
    """Call one function after the other on the calling thread, until a None."""
    while (job := jobs.get()) is not None:
        try:
            job()
        except Exception:
            log.exception("a job of a thread raised")
        del job  # else it would live until the next one comes


class Posts(Protocol):
    """An object that belongs to one thread.

    Attributes:
        post: has that thread call a function.
    """

    post: Callable[[Callable[[], None]], Any]


S = TypeVar("S", bound=Posts)


def posted(method: Callable[Concatenate[S, P], None]) -> Callable[Concatenate[S, P], None]:
    """Let a method be called on any thread: the one that the object belongs to runs it."""

    def post(self: S, /, *args: P.args, **kwargs: P.kwargs) -> None:
        self.post(partial(method, self, *args, **kwargs))

    post.__doc__ = method.__doc__
    return post
