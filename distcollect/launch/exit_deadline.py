"""Ends this process in time, even if one of its threads holds the interpreter lock for ever.

No Python code can run then, nor a signal handler of Python's. So the C library's own timers do the
work: each calls one function of the C library on a thread of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import os
import struct
import sys
import time
from collections.abc import Iterator

from distcollect.common.open_files import flush_output
from distcollect.errors import ArgumentError

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
