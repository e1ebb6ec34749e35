"""Counts the frames that a process steps, and says what it does, in memory its parent can read.

The memory stays readable and exact after the process was killed. The parent makes a
:class:`SharedStepCounter` and lets the process inherit its descriptor; the process writes to it
with a :class:`StepCounter`.
"""

from __future__ import annotations

import enum
import faulthandler
import itertools
import mmap
import os
import re
import signal
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from distcollect.common.memory_segment import small_file

# What stands where in a block of the memory; all are int64.
STEPPED = 0  # frames stepped in all
TASK = 1  # what is being done, a value of Task
LIMIT_MS = 2  # how long that may take without progress; 0: as long as a step may take
NUM_TASKS = 3  # counts the tasks, so that each can be told from the one before
_BLOCK = 4  # cells in a block

# A process that gets this signal writes the stack of its main thread to the memory. It is ignored
# by processes that have no handler for it.
STACK_SIGNAL = signal.SIGURG
_STACK_FRAMES = 6
_PACKAGE = str(Path(__file__).parents[1]) + os.sep
# The first page has the blocks. The stack is written behind it.
_NUM_PAGES = 4


class Task(enum.IntEnum):
    """Tasks of a process's main thread."""

    IDLE = 0
    COLLECT = 1  # stepping or resetting envs
    EVALUATE = 2  # making the envs of an evaluation, and what is done between their steps
    CALL = 3  # a method of the envs that the user called
    SET_UP = 4  # taking a seed, or the state of an earlier run
    HOOK = 5  # a hook of the user's, before or after a rollout
    SERVE = 6  # computing actions for workers


_RECENT_FAULTS = 20


class StepCounter:
    """Frames stepped in all, and the frames among them that no rollout contains, by cause.

    Attributes:
        cells: int64 ``[4]`` as a memoryview, which is several times faster to write to than an
            array; indexed with :data:`STEPPED` and so on, and up to date after every step.
        lost: frames that will never be delivered, by cause.
        env_faults: how often an env raised.
        evaluation: counts the frames of evaluations, in memory of the same parent.
    """

    def __init__(self, memory: np.ndarray | None = None) -> None:
        """Continue from the numbers in ``memory``; None: start at 0 in new private memory.

        ``memory``: int64, one block or several.
        """
        memory = np.zeros(_BLOCK, np.int64) if memory is None else memory
        self.cells = memory[:_BLOCK].data
        self.lost: dict[str, int] = {}
        self.env_faults = 0
        rest = memory[_BLOCK:]
        self.evaluation: StepCounter | None = StepCounter(rest) if len(rest) else None
        self._recent_faults: deque[tuple[float, str]] = deque(maxlen=_RECENT_FAULTS)

    @classmethod
    def inherited(cls, fd: int) -> StepCounter:
        """Count in the memory that the parent process shares as ``fd``.

        On :data:`STACK_SIGNAL` the stack of the main thread is written there, even while that
        thread holds the interpreter's lock. ``fd`` stays open for it.
        """
        memory = _map(fd)
        os.lseek(fd, mmap.PAGESIZE, os.SEEK_SET)
        faulthandler.register(STACK_SIGNAL, file=fd, all_threads=False)
        return cls(memory[: 2 * _BLOCK])

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

    @contextmanager
    def doing(self, task: Task, limit_s: float | None = None) -> Iterator[None]:
        """Say that ``task`` is being done within; tasks may be nested.

        Args:
            task: what is being done.
            limit_s: seconds that it may take without progress; None: as long as a step may take.
        """
        cells = self.cells
        before = cells[TASK], cells[LIMIT_MS]
        cells[NUM_TASKS] += 1
        # 0 would mean no limit of its own.
        cells[LIMIT_MS] = 0 if limit_s is None else max(1, int(min(limit_s, 1e9) * 1000))
        cells[TASK] = task
        try:
            yield
        finally:
            cells[TASK], cells[LIMIT_MS] = before
            cells[NUM_TASKS] += 1

    def env_raised(self, message: str) -> None:
        """Count that an env raised; ``message`` names it and says what."""
        self.env_faults += 1
        self._recent_faults.append((time.time(), message))

    def take_faults(self) -> list[tuple[float, str]]:
        """Return time and message of the newest faults since the last call, at most twenty."""
        taken = list(self._recent_faults)
        self._recent_faults.clear()
        return taken


class SharedStepCounter:
    """The counts of a child process, as its parent reads them.

    Attributes:
        fd: descriptor of the memory; the child inherits it.
    """

    def __init__(self) -> None:
        with small_file() as file:
            self.fd = os.dup(file.fileno())
        os.ftruncate(self.fd, _NUM_PAGES * mmap.PAGESIZE)
        self._memory = _map(self.fd)

    @property
    def stepped(self) -> int:
        """Frames that the process has stepped; exact whenever it was killed."""
        return int(self._memory[STEPPED])

    def blocks(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the cells of the process itself, and those of its evaluations."""
        cells = self._memory[: 2 * _BLOCK].tolist()
        return tuple(cells[:_BLOCK]), tuple(cells[_BLOCK:])

    def stack(self) -> str:
        """Say what the main thread was doing at the last :data:`STACK_SIGNAL`; "" if unknown.

        See :func:`in_words`.
        """
        text = self._memory.tobytes()[mmap.PAGESIZE :].decode("utf-8", "replace")
        newest = text.rpartition("most recent call first")[2]
        return in_words(re.findall(r'File "(.*)", line (\d+) in (.*)', newest))

    def close(self) -> None:
        """Close the descriptor; the numbers stay readable."""
        os.close(self.fd)


def in_words(calls: Sequence[tuple[str, Any, str]]) -> str:
    """Name the innermost of these calls; those of the user's code alone, if it was there.

    Args:
        calls: file, line and function of each, the last call first.
    """
    theirs = list(itertools.takewhile(lambda call: not call[0].startswith(_PACKAGE), calls))
    shown = (theirs or calls)[:_STACK_FRAMES]
    return ", called by ".join(f"{name} ({file}:{line})" for file, line, name in shown)


def _map(fd: int) -> np.ndarray:
    return np.frombuffer(mmap.mmap(fd, _NUM_PAGES * mmap.PAGESIZE), dtype=np.int64)
