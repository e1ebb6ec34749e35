"""Where shared memory is found, as it travels in messages. Nothing here needs torch."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path


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
        """The memory, mapped.

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
