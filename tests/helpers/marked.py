"""Finds processes and files that a run has left behind on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import uuid
from pathlib import Path

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
        return [pid for pid in self._all_pids() if pid not in self._earlier]

    def _all_pids(self) -> list[int]:
        entry = "=".join(self.variable).encode()
        found = []
        others = {os.getpid(), zygote.pid()}
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if (
                    folder.name.isdigit()
                    and int(folder.name) not in others
                    and entry in (folder / "environ").read_bytes().split(b"\0")
                ):
                    found.append(int(folder.name))
        return found

    def left(self) -> list[str]:
        """What is left, as text: running processes, children not reaped, unused files."""
        running = [f"process {pid}: {_command(pid)}" for pid in self.pids()]
        zombies = [f"zombie {pid}" for pid in _zombies()]
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
            self._files |= _files_of(Path(f"/proc/{pid}"))

    def _orphaned_files(self) -> set[str]:
        return {name for name in self._files if Path(name).exists()}


def _files_of(folder: Path) -> set[str]:
    with contextlib.suppress(OSError):
        words = (folder / "maps").read_text().split()
        links = [str(link.readlink()) for link in (folder / "fd").iterdir()]
        return {name for name in (*words, *links) if name.startswith(SHM)}
    return set()


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:200]
    except OSError:
        return "(ended just now)"


def _zombies() -> list[int]:
    """Children of this process that have ended and were not reaped."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if state == "Z" and int(parent) == os.getpid():
                found.append(int(stat.parent.name))
    return found
