"""Finds processes and files that a run has left behind on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import uuid
from pathlib import Path

from helpers.descendants import command_of, links_of, processes, with_variable

from distcollect.launch import zygote

SHM = "/dev/shm/"
# One for all tests of this process: workers that are forked from its zygote show the environment
# with which the zygote was started, maybe by an earlier test.
_MARK = ("DISTCOLLECT_TEST_MARK", uuid.uuid4().hex)


class Marked:
    """Processes started from now on with a mark in their environment; their files in /dev/shm.

    This process's zygote is not among them: it waits for the next collector.
    """

    def __init__(self) -> None:
        self.variable = _MARK
        self._files: set[str] = set()
        self._earlier: set[int] = set()
        self._earlier = set(self.pids())

    def pids(self) -> list[int]:
        """The ids of running processes with the mark, without this one."""
        others = {os.getpid(), zygote.pid(), *self._earlier}
        return [pid for pid in with_variable(*self.variable) if pid not in others]

    def left(self) -> list[str]:
        """What is left, as text: running processes, children not reaped, unused files."""
        running = [f"process {pid}: {command_of(pid)}" for pid in self.pids()]
        own = ("Z", os.getpid())
        zombies = [f"zombie {pid}" for pid, about in processes().items() if about == own]
        return [*running, *zombies, *(f"file {name}" for name in self._orphaned_files())]

    def gone(self, timeout_s: float = 10, *, but: set[int] = frozenset()) -> bool:
        """Wait until nothing is left except the processes in ``but``."""
        deadline = time.monotonic() + timeout_s
        while True:
            if set(self.pids()) <= but and (but or not self.left()):
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)

    def kill(self) -> None:
        """Kill the processes that are left."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def note(self) -> None:
        """Record the files in /dev/shm that they use now; these must disappear with them."""
        for pid in self.pids():
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/maps").read_text().split() + links_of(pid)
                self._files |= {name for name in words if name.startswith(SHM)}

    def _orphaned_files(self) -> set[str]:
        return {name for name in self._files if Path(name).exists()}
