"""How much Python does, without a clock: calls, bytecode instructions, tensor operations."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from torch.utils._python_dispatch import TorchDispatchMode

import distcollect

_PACKAGE = str(Path(distcollect.__file__).parent)


class Work(NamedTuple):
    """What was done, on one thread or on several.

    Attributes:
        calls: of functions of this package.
        c_calls: of C functions, by functions of this package.
        instructions: bytecode instructions of this package.
    """

    calls: int
    c_calls: int
    instructions: int

    def per(self, more: Work, times: int) -> Work:
        """Return what one of the ``times`` that ``more`` did in addition has cost, rounded."""
        return Work(*(round((b - a) / times) for a, b in zip(self, more, strict=True)))


class _Counter:
    """Counts on one thread; no other thread writes to it."""

    def __init__(self) -> None:
        self.calls = self.c_calls = self.instructions = 0

    def trace(self, frame: FrameType, event: str, _: object) -> Any:
        """Be the trace function of a thread: see :func:`sys.settrace`."""
        if event == "call":
            if not frame.f_code.co_filename.startswith(_PACKAGE):
                return None
            self.calls += 1
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        elif event == "opcode":
            self.instructions += 1
        return self.trace

    def profile(self, frame: FrameType, event: str, _: object) -> None:
        """Be the profile function of a thread: see :func:`sys.setprofile`."""
        if event == "c_call" and frame.f_code.co_filename.startswith(_PACKAGE):
            self.c_calls += 1


def work_of(function: Callable[[], object], *, threads: str = "") -> Work:
    """Count the work that a function causes.

    Args:
        function: to be called, once.
        threads: also count on threads that begin meanwhile, if their name begins so; "": only on
            this one.
    """
    counters = [_Counter()]

    def count_here(*event: Any) -> Any:
        """Be the first trace function of another thread."""
        if not threading.current_thread().name.startswith(threads):
            sys.settrace(None)
            return None
        counters.append(_Counter())
        sys.settrace(counters[-1].trace)
        sys.setprofile(counters[-1].profile)
        return counters[-1].trace(*event)

    before = sys.gettrace(), sys.getprofile()
    if threads:
        threading.settrace(count_here)
    sys.settrace(counters[0].trace)
    sys.setprofile(counters[0].profile)
    try:
        function()
    finally:
        sys.settrace(before[0])
        sys.setprofile(before[1])
        threading.settrace(None)  # type: ignore[arg-type]
    return Work(*(sum(getattr(c, name) for c in counters) for name in Work._fields))


class TensorOperations(TorchDispatchMode):
    """Counts the operations on tensors that a thread does in a with block."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += 1
        return function(*args, **kwargs or {})
