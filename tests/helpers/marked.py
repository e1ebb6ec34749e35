"""Finds what a run has left on this machine: processes by a mark in their environment, files."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import uuid
from pathlib import Path

SHM = "/dev/shm/"


class Marked:
    """Processes that carry one mark, and the files in /dev/shm that they were seen to use."""

    def __init__(self) -> None:
        self.variable = ("DISTCOLLECT_TEST_MARK", uuid.uuid4().hex)
        self._files: set[str] = set()

    def pids(self) -> list[int]:
        """The running processes with the mark, but for this one."""
        entry = "=".join(self.variable).encode()
        found = []
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if (
                    folder.name.isdigit()
                    and int(folder.name) != os.getpid()
                    and entry in (folder / "environ").read_bytes().split(b"\0")
                ):
                    found.append(int(folder.name))
        return found

    def left(self) -> list[str]:
        """What is left, in words: running processes, children not reaped, unused files."""
        running = [f"process {pid}: {_command(pid)}" for pid in self.pids()]
        zombies = [f"zombie {pid}" for pid in _zombies()]
        return [*running, *zombies, *(f"file {name}" for name in self._orphaned_files())]

    def gone(self, timeout_s: float = 10, *, but: set[int] = frozenset()) -> bool:
        """Wait until nothing is left, but for the processes in ``but``."""
        deadline = time.monotonic() + timeout_s
        while True:
            if set(self.pids()) <= but and (but or not self.left()):
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)

    def kill(self) -> None:
        """End what is left."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def note(self) -> None:
        """Take down which files in /dev/shm they use now; those must go with them."""
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
    """This process's children that have ended and were not reaped."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if state == "Z" and int(parent) == os.getpid():
                found.append(int(stat.parent.name))
    return found
