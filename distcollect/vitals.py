"""Numbers that a worker process keeps where whoever started it can read them after its end."""

from __future__ import annotations

import mmap
import os

import numpy as np

# Places in the memory, all int64. The engine writes them.
STEPPED = 0  # frames stepped in all
BUSY = 1  # 1 while it steps or resets envs


class Vitals:
    """One page of memory that a process shares with its parent.

    Attributes:
        fd: its descriptor, to be inherited.
    """

    def __init__(self) -> None:
        self.fd = os.memfd_create("distcollect-vitals", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, mmap.PAGESIZE)
        self._numbers = mapped(self.fd)

    @property
    def stepped(self) -> int:
        """Frames that the process has stepped, exact whenever it was killed."""
        return int(self._numbers[STEPPED])

    @property
    def busy(self) -> bool:
        """Whether it is in the middle of stepping or resetting envs."""
        return bool(self._numbers[BUSY])

    def close(self) -> None:
        """Give the descriptor back; the numbers stay readable."""
        os.close(self.fd)


def mapped(fd: int) -> np.ndarray:
    """The numbers behind a descriptor, int64."""
    return np.frombuffer(mmap.mmap(fd, mmap.PAGESIZE), dtype=np.int64)
