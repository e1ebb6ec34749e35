"""Notice that this process is to end soon: a signal that asks for it.

Python runs signal handlers on the main thread, between any two of its steps. So the handler only
takes note; what is to be done is done where the user's loop asks, or waits.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

log = logging.getLogger(__name__)

# What a job is told to end with: SIGTERM by most, SIGUSR2 by submitit and by sbatch --signal.
SIGNALS = (signal.SIGTERM, signal.SIGUSR2)

# "Temporary failure; the user is invited to retry", of sysexits.h.
EXIT_TO_RESUME = 75


class Interrupted(SystemExit):
    """This process ends because it was told to, with its state saved: it can be resumed."""

    def __init__(self) -> None:
        super().__init__(EXIT_TO_RESUME)


_told: str = ""
_leave: Callable[[], None] | None = None
_previous: dict[int, Any] = {}


def watch(leave: Callable[[], None]) -> None:
    """Take note of the signals from now on, and have waits of the main thread call ``leave``.

    Args:
        leave: saves, and raises :class:`Interrupted`.
    """
    global _leave  # noqa: PLW0603 - signals concern the process
    _leave = leave
    if threading.current_thread() is not threading.main_thread():
        log.warning("a Checkpoint made on another thread than the main one sees no signals")
        return
    for number in SIGNALS:
        if signal.getsignal(number) is not _note:
            _previous[number] = signal.signal(number, _note)


def told() -> str:
    """The signal that told this process to end; "" if none did."""
    return _told


def exit_if_requested() -> None:
    """End the wait that calls this, if the process was told to end and somebody can save."""
    if _told and _leave is not None and threading.current_thread() is threading.main_thread():
        _leave()


def forget() -> None:
    """Give the signals back their meaning."""
    global _leave, _told
    _leave, _told = None, ""
    for number, handler in _previous.items():
        signal.signal(number, handler)
    _previous.clear()


def _note(number: int, frame: FrameType | None) -> None:
    global _told  # noqa: PLW0603 - signals concern the process
    _told = signal.Signals(number).name
    previous = _previous.get(number)
    if callable(previous):
        previous(number, frame)
