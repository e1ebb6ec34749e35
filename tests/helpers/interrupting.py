"""Sends Ctrl-C at every line that a call executes in this package, one line after the other.

A signal's handler runs between two bytecodes of the main thread, so Ctrl-C can come in any line.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import distcollect

_PACKAGE = str(Path(distcollect.__file__).parent)
# What the package calls to wait, to hand over, and to enter and leave contexts.
_LIBRARY = {
    threading.__file__,
    contextlib.__file__,
    str(Path(threading.__file__).parent / "concurrent" / "futures" / "_base.py"),
}
# Within which Ctrl-C that came is raised.
_SOON_S = 30
# If this is set, every line is tried, not a sample; see CONTRIBUTING.md.
ALL_LINES = "DISTCOLLECT_TEST_ALL_LINES"


class LineTracer:
    """Calls ``act`` before the ``at``-th traced line of the calling thread.

    Attributes:
        num_lines: the lines that were traced so far.
        where: the file, line and function of the line at which ``act`` was called.
        frame: of that line, while ``act`` is called.
    """

    def __init__(self, at: int, act: Callable[[], object]) -> None:
        self.num_lines = 0
        self.where = ""
        self.frame: FrameType | None = None
        self._at = at
        self._act = act
        self._is_ours: dict[CodeType, bool] = {}

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(before)

    def _enter(self, frame: FrameType, event: str, arg: object) -> Any:
        # Others call the library too. What an exception in torch's own code does is up to torch.
        caller: FrameType | None = frame
        while caller is not None and caller.f_code.co_filename in _LIBRARY:
            caller = caller.f_back
        if caller is None:
            return None
        code = caller.f_code
        is_ours = self._is_ours.get(code)
        if is_ours is None:
            is_ours = self._is_ours[code] = code.co_filename.startswith(_PACKAGE)
        return self._line if is_ours else None

    def _line(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "line":
            self.num_lines += 1
            if self.num_lines == self._at:
                code = frame.f_code
                self.where = f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"
                sys.settrace(None)
                self.frame = frame
                try:
                    self._act()
                finally:
                    self.frame = None
        return self._line


def interrupted_at(at: int, call: Callable[[], object]) -> tuple[bool, LineTracer]:
    """Call ``call`` and send Ctrl-C at its ``at``-th line.

    It is raised within the call, or at the latest soon after it.

    Returns:
        Whether it came, and the tracer. If not, the call has fewer lines.
    """

    def ctrl_c() -> None:
        handler = signal.getsignal(signal.SIGINT)
        assert callable(handler)
        handler(signal.SIGINT, tracer.frame)  # as Python does

    tracer = LineTracer(at, ctrl_c)
    # What is sent again later is for after the call.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        try:
            with tracer.tracing():
                call()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        if tracer.where:
            time.sleep(_SOON_S)
    except KeyboardInterrupt:
        return True, tracer
    assert not tracer.where, f"Ctrl-C at {tracer.where} was swallowed"
    return False, tracer


def sampled(num_lines: int, most: int) -> list[int]:
    """Numbers of lines, from 1 to ``num_lines``: evenly spread, at most ``most`` of them."""
    if num_lines <= most:
        return list(range(1, num_lines + 1))
    return sorted({1 + index * (num_lines - 1) // (most - 1) for index in range(most)})
