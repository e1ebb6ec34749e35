"""The processes of this machine, and those that a process has started, directly or not."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def processes() -> dict[int, tuple[str, int]]:
    """The state of each process, such as "Z", and the id of its parent, by its own id."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            found[int(stat.parent.name)] = state, int(parent)
    return found


def with_variable(name: str, value: str) -> list[int]:
    """The ids of the processes that were started with an environment variable."""
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"{name}={value}".encode() in environ.read_bytes().split(b"\0"):
                found.append(int(environ.parent.name))
    return found


def links_of(pid: int | str | None) -> list[str]:
    """What a process has open; the links of its file descriptors."""
    links = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # it has been closed meanwhile
            links.append(str(fd.readlink()))
    return links


def command_of(pid: int) -> str:
    """The begin of a process's command."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:200]
    except OSError:
        return "(ended just now)"


def descendants(ancestor: int, *, zombies: bool = False) -> list[int]:
    """The ids of all descendants that run; with ``zombies`` also of those that were not reaped."""
    all_of_them = processes().items()
    parents = {pid: parent for pid, (state, parent) in all_of_them if zombies or state != "Z"}
    found = [ancestor]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found[1:]


def signal_all(ancestor: int, number: int) -> None:
    """Signal all descendants, the youngest last, as batch systems do with a job."""
    for pid in descendants(ancestor):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
