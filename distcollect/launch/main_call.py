"""Calls the user's ``main``, and ends what it leaves behind, or the process.

When a function returns, Python destroys its variables before the caller goes on. That can hang in
native code that holds the interpreter lock: the last owner of a Gloo process group, often the
reducer of a DistributedDataParallel, waits for the group's threads, and such a thread waits for the
lock, to release a tensor that it has gathered. So the variables of ``main`` are kept until
everything of ours has ended. Then they are destroyed with a deadline, and process groups are not
destroyed at all.

No Python code can run while a thread holds the interpreter lock, nor a signal handler of Python's.
So the C library's own timers end the process: each calls one function of the C library on a thread
of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import os
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Generic, TypeVar

import torch.distributed
from torch import nn

from distcollect.common.forks import keep_for_ever
from distcollect.common.open_files import flush_output
from distcollect.common.signals import Interrupted
from distcollect.errors import ArgumentError

T = TypeVar("T")

# Torch declares no types for its process groups.
dist: Any = torch.distributed

EXIT_TIMEOUT = "DISTCOLLECT_EXIT_TIMEOUT_S"

_DEFAULT_S, _NO_LIMIT_S = 60.0, 1e9
# What hangs is reported, then where the threads are; then the process ends.
_STACKS_AFTER_S, _EXIT_AFTER_S = 0.25, 1.25
_MESSAGE_BYTES = 2000
_SIGEV_THREAD = 2
_STDERR = 2


# Of 64-bit Linux: value, signal, notify, function and its attributes.
_SIGEVENT = struct.Struct("PiiPP32x")
# Interval and value, each in seconds and nanoseconds.
_ITIMERSPEC = struct.Struct("llll")


class ExitDeadline:
    """Ends this process by ``exit_code`` after :func:`timeout_s`, unless it is closed before.

    Before, it writes to stderr what :meth:`waits_for` says, and the Python stack of each thread.
    """

    def __init__(self, exit_code: int) -> None:
        flush_output()
        limit_s = timeout_s()
        self._seconds = f"{limit_s:g} s"
        self._exit_code = exit_code
        self._timers: list[ctypes.c_void_p] = []
        self._libc = ctypes.CDLL("librt.so.1", use_errno=True)
        self._libc.calloc.restype = ctypes.c_void_p
        # Never freed: a timer may still read it when the interpreter has destroyed all objects.
        self._message: int = self._libc.calloc(_MESSAGE_BYTES, 1)
        self.waits_for("this process")
        self._call_later(limit_s, "warnx", self._message)
        faulthandler.dump_traceback_later(limit_s + _STACKS_AFTER_S, file=_STDERR)
        self._call_later(limit_s + _EXIT_AFTER_S, "_exit", exit_code & 0xFF)

    def waits_for(self, what: str) -> None:
        """Note what is to end now."""
        text = (
            f"distcollect: {what} did not end within {self._seconds}; the process is ended with "
            f"exit code {self._exit_code}. Where its threads are:"
        )
        data = text.encode()[: _MESSAGE_BYTES // 2].replace(b"%", b"%%")[: _MESSAGE_BYTES - 1]
        ctypes.memmove(self._message, data + b"\0", len(data) + 1)

    def close(self) -> None:
        """Let this process live on."""
        faulthandler.cancel_dump_traceback_later()
        while self._timers:
            self._libc.timer_delete(self._timers.pop())

    def _call_later(self, delay_s: float, function: str, value: int) -> None:
        address = ctypes.cast(getattr(self._libc, function), ctypes.c_void_p).value
        event = _SIGEVENT.pack(value, 0, _SIGEV_THREAD, address, 0)
        spec = _ITIMERSPEC.pack(0, 0, int(delay_s), int(delay_s % 1 * 1e9) + 1)
        timer = ctypes.c_void_p()
        failed = self._libc.timer_create(
            time.CLOCK_MONOTONIC, event, ctypes.byref(timer)
        ) or self._libc.timer_settime(timer, 0, spec, None)
        if failed:
            code = ctypes.get_errno()
            raise OSError(code, f"no timer for the end of this process: {os.strerror(code)}")
        self._timers.append(timer)


def exit_code(exiting: SystemExit | None) -> int:
    """The exit code of a process that this exception ends; None: 0."""
    if exiting is None or exiting.code is None:
        return 0
    return exiting.code if isinstance(exiting.code, int) else 1


def ends_as_failed(error: BaseException | None) -> bool:
    """Return True if this exception ends a process as failed, and not for a later resumption."""
    if isinstance(error, SystemExit):
        return exit_code(error) != 0 and not isinstance(error, Interrupted)
    return error is not None


def timeout_s() -> float:
    """Return how long what ``main`` left behind has to end, in seconds.

    Raises:
        ArgumentError: the environment variable is no number of seconds.
    """
    text = os.environ.get(EXIT_TIMEOUT)
    try:
        seconds = float(text) if text else _DEFAULT_S
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 10**6:
        raise ArgumentError(f"{EXIT_TIMEOUT}={text!r}: must be a number of seconds, 0: no limit")
    return seconds or _NO_LIMIT_S


class MainCall(Generic[T]):
    """One call of ``main``."""

    def __init__(self, main: Callable[[], T]) -> None:
        self._main = main
        self._frames: list[FrameType] = []
        self._had_group = _has_group()

    def result(self) -> T:
        """Call ``main`` and return its result. Its variables are kept."""
        # A profiler of the user's is left alone; then the variables end with the call.
        if sys.getprofile() is None:
            sys.setprofile(self._keep_first_frame)
        try:
            return self._main()
        finally:
            if sys.getprofile() == self._keep_first_frame:
                sys.setprofile(None)

    def _keep_first_frame(self, frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            sys.setprofile(None)
            self._frames.append(frame)

    def end_what_it_left(self, exiting: SystemExit | None = None) -> None:
        """Destroy the variables of ``main``, and the process group that it made and left.

        If that hangs, the process is ended: see :class:`ExitDeadline`.

        Args:
            exiting: what ``main`` raised; None: it has returned. All functions that this exception
                came through lose their variables.
        """
        code = exit_code(exiting)
        with contextlib.closing(ExitDeadline(code)) as deadline:
            for group in _process_groups():
                keep_for_ever(group)
            for name, variables in self._variables(exiting):
                for variable in list(variables):
                    kind = type(variables[variable]).__qualname__
                    what = f"the variable {variable!r} of {name}(), of type {kind},"
                    deadline.waits_for(f"main() is done, but {what}")
                    del variables[variable]
            deadline.waits_for("main() is done, but the process group that it left")
            # Those of other trainers may wait for this one if it has failed.
            if code == 0 and _has_group() and not self._had_group:
                dist.destroy_process_group()

    def _variables(self, exiting: SystemExit | None) -> Iterator[tuple[str, dict[str, Any]]]:
        """The functions that have ended, and their variables, to which nothing else refers now."""
        frames = [*self._frames]
        if exiting is not None:
            of_error = [frame for frame, _ in traceback.walk_tb(exiting.__traceback__)]
            frames += [frame for frame in of_error if frame not in frames]
        self._frames.clear()
        while frames:
            frame = frames.pop(0)
            variables = dict(frame.f_locals)
            try:
                frame.clear()
            except RuntimeError:  # it is still being executed
                continue
            # Before Python 3.13 a frame keeps the dictionary that it gave, until it is asked again.
            dict(frame.f_locals)
            name = frame.f_code.co_name
            del frame
            yield name, variables


def _has_group() -> bool:
    return bool(dist.is_available() and dist.is_initialized())


def _process_groups() -> list[Any]:
    """The default process group, and those of modules such as DistributedDataParallel."""
    if not dist.is_available():
        return []
    groups = [dist.group.WORLD] if dist.is_initialized() else []
    for module in gc.get_objects():
        # Not isinstance(): it runs code of proxy objects.
        if issubclass(type(module), nn.Module):
            group = vars(module).get("process_group")
            if isinstance(group, dist.ProcessGroup):
                groups.append(group)
    return groups


_code_at_exit = 0


@contextlib.contextmanager
def interpreter_exit_deadline() -> Iterator[None]:
    """Give the interpreter's exit a deadline, whatever is done within.

    If what is done within raises SystemExit, that one's exit code holds.

    Raises:
        ArgumentError: see :func:`timeout_s`.
    """
    global _code_at_exit  # noqa: PLW0603 - a process ends once
    timeout_s()
    atexit.unregister(_begin_at_exit)
    atexit.register(_begin_at_exit)
    _code_at_exit = 0
    try:
        yield
    except SystemExit as error:
        _code_at_exit = exit_code(error)
        raise


def _begin_at_exit() -> None:
    # Python notes an exception here that nothing has caught.
    uncaught = getattr(sys, "last_type", None)
    code = _code_at_exit if uncaught is None else 1
    deadline = ExitDeadline(130 if uncaught is KeyboardInterrupt else code)
    deadline.waits_for("an object that the script left behind")


def _forked() -> None:
    atexit.unregister(_begin_at_exit)


os.register_at_fork(after_in_child=_forked)
