"""The account of the frames that a process stepped."""

from __future__ import annotations

import mmap
import os

import numpy as np


class StepCounter:
    """Frames stepped in all, and those of them that are in no rollout, by cause.

    Attributes:
        memory: int64 ``[2]``: frames stepped, up to date after every step; and 1 while envs are
            stepped or reset for a rollout, else 0. It may be shared with a process that wants to
            know when this one was killed.
        cells: the same, several times faster to write to.
        lost: frames that will never be delivered, by cause.
        env_faults: how often an env raised.
    """

    def __init__(self, memory: np.ndarray | None = None) -> None:
        """Go on from what stands in ``memory``; None: from 0, in memory of its own."""
        self.memory = np.zeros(2, np.int64) if memory is None else memory
        self.cells = self.memory.data
        self.lost: dict[str, int] = {}
        self.env_faults = 0

    @property
    def stepped(self) -> int:
        """Frames stepped in all."""
        return int(self.cells[0])

    def add(self, frames: int) -> None:
        """Account for ``frames`` that were stepped."""
        self.cells[0] += frames

    def lose(self, cause: str, frames: int) -> None:
        """Account for ``frames`` that will never be delivered."""
        if frames:
            self.lost[cause] = self.lost.get(cause, 0) + frames


# Places in the memory, all int64. The engine writes them.
STEPPED = 0  # frames stepped in all


BUSY = 1  # 1 while it steps or resets envs


class SharedCounters:
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
