"""Counts the frames that a process steps, in memory that its parent can read.

The count stays readable and exact after the process was killed. The parent makes a
:class:`SharedStepCounter` and lets the process inherit its descriptor; the process counts in it
with a :class:`StepCounter`.
"""

from __future__ import annotations

import mmap
import os
import time
from collections import deque

import numpy as np

# What stands where in the memory; both are int64.
STEPPED = 0  # frames stepped in all
BUSY = 1  # 1 while envs are stepped or reset for a rollout, else 0

_RECENT_FAULTS = 20


class StepCounter:
    """Frames stepped in all, and the frames among them that no rollout contains, by cause.

    Attributes:
        memory: int64 ``[2]``, indexed with :data:`STEPPED` and :data:`BUSY`; up to date after
            every step.
        cells: the same memory as a memoryview, which is several times faster to write to.
        lost: frames that will never be delivered, by cause.
        env_faults: how often an env raised.
    """

    def __init__(self, memory: np.ndarray | None = None) -> None:
        """Continue from the numbers in ``memory``; None: start at 0 in new private memory."""
        self.memory = np.zeros(2, np.int64) if memory is None else memory
        self.cells = self.memory.data
        self.lost: dict[str, int] = {}
        self.env_faults = 0
        self._recent_faults: deque[tuple[float, str]] = deque(maxlen=_RECENT_FAULTS)

    @classmethod
    def inherited(cls, fd: int) -> StepCounter:
        """Count in the memory that the parent process shares as ``fd``, and close ``fd``."""
        memory = _map(fd)
        os.close(fd)
        return cls(memory)

    @property
    def stepped(self) -> int:
        """Frames stepped in all."""
        return int(self.cells[STEPPED])

    def add(self, frames: int) -> None:
        """Count ``frames`` that were stepped."""
        self.cells[STEPPED] += frames

    def lose(self, cause: str, frames: int) -> None:
        """Count ``frames`` that will never be delivered."""
        if frames:
            self.lost[cause] = self.lost.get(cause, 0) + frames

    def env_raised(self, message: str) -> None:
        """An env raised; ``message`` names it and says what."""
        self.env_faults += 1
        self._recent_faults.append((time.time(), message))

    def take_faults(self) -> list[tuple[float, str]]:
        """Time and message of the newest faults since the last call, at most twenty."""
        taken = list(self._recent_faults)
        self._recent_faults.clear()
        return taken


class SharedStepCounter:
    """What a child process counts, as its parent reads it.

    Attributes:
        fd: descriptor of the memory; the child inherits it.
    """

    def __init__(self) -> None:
        self.fd = os.memfd_create("distcollect-steps", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, mmap.PAGESIZE)
        self._memory = _map(self.fd)

    @property
    def stepped(self) -> int:
        """Frames that the process has stepped; exact whenever it was killed."""
        return int(self._memory[STEPPED])

    @property
    def busy(self) -> bool:
        """Whether the process is stepping or resetting envs."""
        return bool(self._memory[BUSY])

    def close(self) -> None:
        """Close the descriptor; the numbers stay readable."""
        os.close(self.fd)


def _map(fd: int) -> np.ndarray:
    return np.frombuffer(mmap.mmap(fd, mmap.PAGESIZE), dtype=np.int64)
