"""Waiting for what another thread or process does."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Envs in threads of this process wait for it. It can't be pickled, so they find it in this module.
test_is_over = threading.Event()


def eventually(
    condition: Callable[[], Any], timeout_s: float = 60.0, about: Callable[[], Any] = lambda: None
) -> None:
    """Wait until ``condition()`` is true; if that takes too long, fail and show ``about()``."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, about()
        time.sleep(0.01)


def stop_process(pid: int) -> None:
    """Stop a process, and wait until all of its threads have stopped.

    Until a busy machine has run the thread that gets the signal, the other threads go on.
    """
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: all(state in "TZX" for state in _thread_states(pid)))


def _thread_states(pid: int) -> list[str]:
    stats = (path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat"))
    return [stat.rpartition(")")[2].split()[0] for stat in stats]
