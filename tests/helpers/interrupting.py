"""Raises an exception at every line that a call executes in this package, one line after the other.

A signal's handler runs between two bytecodes of the main thread, so Ctrl-C can raise in any line.
"""

from __future__ import annotations

import contextlib
import dis
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
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
# If this is set, every line is tried, not a sample; see CONTRIBUTING.md.
ALL_LINES = "DISTCOLLECT_TEST_ALL_LINES"


class LineTracer:
    """Calls ``act`` before the ``at``-th traced line of the calling thread.

    Attributes:
        num_lines: the lines that were traced so far.
        where: the file, line and function of the line at which ``act`` was called.
    """

    def __init__(self, at: int, act: Callable[[], object], *, under: str = _PACKAGE) -> None:
        """``under``: the start of the paths of the files whose lines count."""
        self.num_lines = 0
        self.where = ""
        self._at = at
        self._act = act
        self._under = under
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
            is_ours = self._is_ours[code] = code.co_filename.startswith(self._under)
        return self._line if is_ours else None

    def _line(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "line" and frame.f_lasti not in _without_signals(frame.f_code):
            self.num_lines += 1
            if self.num_lines == self._at:
                code = frame.f_code
                self.where = f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"
                sys.settrace(None)
                self._act()
        return self._line


_known: dict[CodeType, frozenset[int]] = {}


def _without_signals(code: CodeType) -> frozenset[int]:
    """Where lines begin at which Python handles no signal, as offsets of bytecodes.

    It handles signals after a call, on entering a function and on jumping back. So it handles none

    - before it calls ``__exit__`` at the end of a ``with`` block: with a lock that is one call in
      C, after which the lock is free;
    - between an assignment to an attribute and a return of a variable or constant that follows it.
    """
    if code not in _known:
        found = list(dis.get_instructions(code))
        _known[code] = frozenset(
            first.offset
            for index, first in enumerate(found)
            if _calls_exit(found[index:])
            or (index and _returns_at_once(found[index - 1 : index + 2]))
        )
    return _known[code]


def _returns_at_once(found: Sequence[dis.Instruction]) -> bool:
    before, *rest = (instruction.opname for instruction in found)
    return (
        before == "STORE_ATTR"
        and len(rest) == 2
        and rest[0].startswith(("LOAD_FAST", "LOAD_CONST"))
        and rest[1] == "RETURN_VALUE"
    )


def _calls_exit(found: Sequence[dis.Instruction]) -> bool:
    while found[0].opname in ("SWAP", "POP_BLOCK", "ROT_TWO"):
        found = found[1:]
    if [i.opname for i in found[:3]] == ["LOAD_CONST", "DUP_TOP", "DUP_TOP"]:  # Python 3.10
        return (found[3].opname, found[3].arg) == ("CALL_FUNCTION", 3)
    return [(i.opname, i.argval) for i in found[:3]] == [("LOAD_CONST", None)] * 3 and any(
        "CALL" in i.opname and i.arg == 2 for i in found[3:5]
    )


def interrupt() -> None:
    raise KeyboardInterrupt


def interrupted_at(
    at: int, call: Callable[[], object], *, under: str = _PACKAGE
) -> tuple[bool, LineTracer]:
    """Call ``call`` and raise KeyboardInterrupt at its ``at``-th line; ``under``: see LineTracer.

    Returns:
        Whether it was interrupted, and the tracer. If not, the call has fewer lines.
    """
    tracer = LineTracer(at, interrupt, under=under)
    try:
        with tracer.tracing():
            call()
    except KeyboardInterrupt:
        return True, tracer
    assert not tracer.where, f"the exception at {tracer.where} was swallowed"
    return False, tracer


def sampled(num_lines: int, most: int) -> list[int]:
    """Numbers of lines, from 1 to ``num_lines``: evenly spread, at most ``most`` of them."""
    if num_lines <= most:
        return list(range(1, num_lines + 1))
    return sorted({1 + index * (num_lines - 1) // (most - 1) for index in range(most)})
