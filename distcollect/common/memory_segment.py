"""Where shared memory is found, as it travels in messages. Nothing here needs torch."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO


@cache
def namespace(kind: str) -> str:
    """Return a name that is equal for the processes in a namespace: "pid" or "net".

    Raises:
        OSError: the kernel, or a sandbox, has none.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path(f'/proc/self/ns/{kind}').readlink()}"


def own_network() -> str:
    """Return a name that is equal for processes that reach each other by abstract sockets."""
    try:
        return namespace("net")
    except OSError:
        return platform.node()


@dataclass(frozen=True)
class Segment:
    """Where shared memory is found.

    Attributes:
        pid: the process that made it.
        fd: its descriptor in that process.
        name: of the anonymous file; unlike a pid it is never used again.
        num_bytes: its size.
        host: where it can be mapped, see :func:`.shared_memory.host_of_memory`.
    """

    pid: int
    fd: int
    name: str
    num_bytes: int
    host: str

    def open(self) -> mmap.mmap:
        """Map the memory.

        Raises:
            OSError: the process is gone, on another host, or belongs to another user.
        """
        path = f"/proc/{self.pid}/fd/{self.fd}"
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            # Checked on the opened descriptor, as another process may have the pid by now.
            if f"memfd:{self.name} " not in str(Path(f"/proc/self/fd/{fd}").readlink()):
                raise ProcessLookupError(f"{path} is no longer {self.name}")
            return mmap.mmap(fd, self.num_bytes)
        finally:
            os.close(fd)


def memory_file(name: str) -> int:
    """Make memory that is a file without a path, named ``name``; return its descriptor.

    Raises:
        OSError: the kernel, or a sandbox, doesn't provide it.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    # Python was built for a libc older than this one, as the builds of uv and conda are.
    libc = ctypes.CDLL(None, use_errno=True)
    fd: int = libc.memfd_create(name.encode(), 1)  # MFD_CLOEXEC
    if fd < 0:
        raise OSError(ctypes.get_errno(), f"memfd_create: {os.strerror(ctypes.get_errno())}")
    return fd


def small_file() -> IO[bytes]:
    """Make a file without a path, in memory or else on the disk.

    Raises:
        OSError: the system provides neither.
    """
    try:
        return os.fdopen(memory_file("distcollect"), "w+b")
    except OSError:
        return tempfile.TemporaryFile()
