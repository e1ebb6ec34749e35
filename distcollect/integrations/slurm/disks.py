"""Whether all hosts of a cluster see a folder, as far as one of them can find out."""

from __future__ import annotations

from pathlib import Path

# File systems in memory: no other host sees them.
_IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"}
# File systems on a disk of this host, which a small cluster may export to the others.
_LOCAL = {"ext2", "ext3", "ext4", "xfs", "btrfs", "overlay", "zfs", "f2fs", "vfat"}
_PRIVATE_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm", "/run")  # noqa: S108 - only compared with


def objection(folder: Path, mounts: str | None = None) -> tuple[str, bool]:
    """Say why other hosts may not see a folder.

    Args:
        folder: an absolute path; the folder need not exist yet.
        mounts: text in the form of /proc/mounts; None: that of this host.

    Returns:
        The reason, or "" if there is none; and whether it is certain.
    """
    for private in _PRIVATE_FOLDERS:
        if folder.is_relative_to(private):
            return f"{folder} is in {private}, of which each host has its own", True
    kind = _file_system(folder, Path("/proc/mounts").read_text() if mounts is None else mounts)
    if kind in _IN_MEMORY:
        return f"{folder} is in this host's memory ({kind})", True
    if kind in _LOCAL:
        return f"{folder} is on a disk of this host ({kind}), which others may not see", False
    return "", False


def _file_system(folder: Path, mounts: str) -> str:
    """The type of the file system that a folder is on."""
    best, kind = "", ""
    for line in mounts.splitlines():
        _, point, found, *_ = line.split()
        point = point.replace("\\040", " ")
        # If several are mounted at one point, the last one is visible.
        if folder.is_relative_to(point) and len(point) >= len(best):
            best, kind = point, found
    return kind
