"""Frames counted over a time window, and CPU time."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeAlias

# The least warm-up, as a share of the window. By then caches are filled, slabs touched and requests
# under way.
WARM_UP = 0.4
_WARM_UP_BATCHES = 3

# (the worker that made the batch, its frames)
Batch: TypeAlias = "tuple[int, int]"


class NotEnough(RuntimeError):
    """The batches ended before the window did."""


def frames_per_s(
    batches: Iterable[Batch],
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """The sum of the sources' rates, each between two arrivals of that source.

    So the window of each source holds whole batches, and a few long batches give no rounding error.

    Args:
        batches: yields (source, frames) as batches arrive.
        seconds: least length of the window after the warm-up.
        clock: in seconds.

    Raises:
        NotEnough: the batches ended before the window did.
    """
    arrivals = iter(batches)
    begin = clock()
    warm: set[int] = set()
    for count, (source, _) in enumerate(arrivals, 1):
        warm.add(source)
        if count >= _WARM_UP_BATCHES and clock() - begin >= WARM_UP * seconds:
            break
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    frames: dict[int, int] = {}
    begin = clock()
    for source, number in arrivals:
        now = clock()
        if source in first:
            frames[source] = frames.get(source, 0) + number
            last[source] = now
        else:
            first[source] = now
        if now - begin >= seconds and warm <= last.keys():
            return sum(count / (last[source] - first[source]) for source, count in frames.items())
    raise NotEnough("the batches ended before the window did")


def cpu_s() -> float:
    """CPU time of this process and of all children that run, in seconds."""
    return time.process_time() + sum(map(_cpu_of, children("self")))


def _cpu_of(pid: int) -> float:
    # In ns, while /proc/PID/stat counts hundredths of a second.
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    own_s = sum(int(task.read_text().split()[0]) for task in tasks) / 1e9
    return own_s + sum(map(_cpu_of, children(pid)))


def children(pid: object) -> list[int]:
    """The ids of the processes that a process has started, and that run."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for child in itertools.chain(*(each.read_text().split() for each in lists))]
