"""The processes that a process has started, and those that these have started."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def descendants(ancestor: int, *, zombies: bool = False) -> list[int]:
    """The ids of all descendants that run; with ``zombies`` also of those that were not reaped."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if zombies or state != "Z":
                parents[int(stat.parent.name)] = int(parent)
    found = [ancestor]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found[1:]


def signal_all(ancestor: int, number: int) -> None:
    """Signal all descendants, the youngest last, as batch systems do with a job."""
    for pid in descendants(ancestor):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
