"""What the cgroups of this process grant it, and the memory that it can still get."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
_MUCH_BYTES = 1 << 30


def cgroup_folders(root: Path, membership: Path, controller: str) -> Sequence[Path]:
    """The folders of this process's cgroup and of its ancestors, the innermost first."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return ()
    found: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        # Version 2 has one tree; version 1 has one for each controller.
        top = root / controllers if controllers else root
        inside = top / path.lstrip("/")
        # In a container the path may be the host's, while only a part of the tree is mounted.
        found += [folder for folder in (inside, *inside.parents) if folder.is_relative_to(top)]
    return found


def read_free_bytes(
    meminfo: Path = Path("/proc/meminfo"),
    cgroups: Path = CGROUPS,
    membership: Path = MEMBERSHIP,
) -> int:
    """Return the memory that this process and its children can still get; -1: not known."""
    free = []
    with contextlib.suppress(OSError):
        lines = meminfo.read_text().splitlines()
        free += [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    # Of version 2, and of version 1.
    of_2, of_1 = "memory.max memory.current", "memory.limit_in_bytes memory.usage_in_bytes"
    for folder in cgroup_folders(cgroups, membership, "memory"):
        for limit, used in (of_2.split(), of_1.split()):
            with contextlib.suppress(OSError, ValueError):  # int("max") is no limit
                granted = int((folder / limit).read_text())
                free.append(granted - int((folder / used).read_text()))
    return max(0, min(free)) if free else -1


def check_free(num_bytes: int) -> None:
    """Check that this process can get so much memory: the kernel finds that only as it is used.

    Raises:
        MemoryError: it can't.
    """
    free = read_free_bytes() if num_bytes >= _MUCH_BYTES else -1
    if 0 <= free < num_bytes:
        raise MemoryError(f"{free / 1e9:,.1f} GB are free on this host")
