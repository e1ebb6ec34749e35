"""Whether all hosts of a cluster see a folder, as far as that can be told from one of them."""

from __future__ import annotations

from pathlib import Path

# In memory: no other host sees these.
_IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"}
# A disk of this host. A small cluster may export it to the others.
_LOCAL = {"ext2", "ext3", "ext4", "xfs", "btrfs", "overlay", "zfs", "f2fs", "vfat"}
_PRIVATE_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm", "/run")  # noqa: S108 - told from others


def objection(folder: Path, mounts: str | None = None) -> tuple[str, bool]:
    """Why other hosts may not see a folder, and whether that is certain; "" if nothing says so.

    Args:
        folder: absolute; it need not be there yet.
        mounts: in the form of /proc/mounts; None: this host's.
    """
    for private in _PRIVATE_FOLDERS:
        if folder.is_relative_to(private):
            return f"{folder} is in {private}, which each host has for itself", True
    kind = _file_system(folder, Path("/proc/mounts").read_text() if mounts is None else mounts)
    if kind in _IN_MEMORY:
        return f"{folder} is in this host's memory ({kind})", True
    if kind in _LOCAL:
        return f"{folder} is on a disk of this host ({kind}), which others may not see", False
    return "", False


def _file_system(folder: Path, mounts: str) -> str:
    """The type of the file system that has a folder."""
    best, kind = "", ""
    for line in mounts.splitlines():
        _, point, found, *_ = line.split()
        point = point.replace("\\040", " ")
        # Of several on one point the last one is seen.
        if folder.is_relative_to(point) and len(point) >= len(best):
            best, kind = point, found
    return kind
