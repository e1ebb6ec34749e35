"""Signals that ask this process to end soon, as before a preemption.

Python runs signal handlers on the main thread, between any two of its steps. So the handler only
notes the signal. The process saves and ends where the user's loop asks for it, or waits.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

log = logging.getLogger(__name__)

# Most schedulers send SIGTERM before they end a job; submitit and sbatch --signal send SIGUSR2.
SIGNALS = (signal.SIGTERM, signal.SIGUSR2)

# "Temporary failure; the user is invited to retry", of sysexits.h.
EXIT_TO_RESUME = 75


class Interrupted(SystemExit):
    """This process ends on request, with its state saved: it can be resumed."""

    def __init__(self) -> None:
        super().__init__(EXIT_TO_RESUME)


_requested: str = ""
_save_and_exit: Callable[[], None] | None = None
_previous: dict[int, Any] = {}


def watch(save_and_exit: Callable[[], None]) -> None:
    """Note the signals from now on; :func:`exit_if_requested` then calls ``save_and_exit``.

    Args:
        save_and_exit: saves, and raises :class:`Interrupted`.
    """
    global _save_and_exit  # noqa: PLW0603 - signals concern the process
    _save_and_exit = save_and_exit
    if threading.current_thread() is not threading.main_thread():
        log.warning("a Checkpoint that is not made on the main thread sees no signals")
        return
    for number in SIGNALS:
        if signal.getsignal(number) is not _note:
            # None: it was not set by Python, which so can't restore it.
            _previous[number] = signal.signal(number, _note) or signal.SIG_DFL


def requested_signal() -> str:
    """The signal that asked this process to end; "" if none did."""
    return _requested


def exit_if_requested() -> None:
    """Save and exit, if a signal asked for it and :func:`watch` was called.

    Waits of the user's thread call this. On other threads than the main one it does nothing.
    """
    on_main_thread = threading.current_thread() is threading.main_thread()
    if _requested and _save_and_exit is not None and on_main_thread:
        _save_and_exit()


def stop_watching() -> None:
    """Restore the previous signal handlers, and forget a signal that has come."""
    global _save_and_exit, _requested
    _save_and_exit, _requested = None, ""
    for number, handler in _previous.items():
        signal.signal(number, handler)
    _previous.clear()


# A signal that is sent to a forked child concerns that process alone: a DataLoader, for example,
# ends its children by SIGTERM.
os.register_at_fork(after_in_child=stop_watching)


def _note(number: int, frame: FrameType | None) -> None:
    global _requested  # noqa: PLW0603 - signals concern the process
    _requested = signal.Signals(number).name
    previous = _previous.get(number)
    if callable(previous):
        previous(number, frame)
