"""Compares two ways to collect: a batch of one, then a batch of the other, in one process.

The machine's load and clock rate change within tenths of a second by more than the difference that
is to be measured. They are about the same for two batches that follow each other.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

import distcollect as dc
from benchmarks.contenders import arguments, bare_loop
from benchmarks.items import Values
from benchmarks.workloads import WORKLOADS

_FEWEST_PAIRS = 8


def run_beside_bare(seconds: float, *, name: str) -> Values:
    """Frames/s of SyncDataCollector over the bare loop's."""
    torch.set_num_threads(1)
    bare = bare_loop(WORKLOADS[name])
    with dc.SyncDataCollector(**arguments(WORKLOADS[name])) as collector:
        return in_turn(bare.rollout, collector.next, seconds, speed=time.perf_counter)


def run_seeded(seconds: float, *, name: str) -> Values:
    """Time of a batch of a seeded SyncDataCollector over that of one without a seed."""
    torch.set_num_threads(1)
    # Two policies would choose other actions, and their episodes would have other lengths.
    given = arguments(WORKLOADS[name])
    with dc.SyncDataCollector(**given) as seeded, dc.SyncDataCollector(**given) as other:
        seeded.set_seed(1)
        clocks = {"time": time.perf_counter, "cpu": time.process_time}
        return in_turn(seeded.next, other.next, seconds, **clocks)


def in_turn(
    one: Callable[[], object],
    other: Callable[[], object],
    seconds: float,
    **clocks: Callable[[], float],
) -> Values:
    """Call both in turn, and compare their durations by each clock.

    Returns:
        For each clock, as "cpu_ratio", the median over pairs of the duration of ``one`` over that
        of ``other``; and the number of "pairs". The first quarter is a warm-up and is left out.
    """
    ratios: list[list[float]] = []

    def timed(work: Callable[[], object]) -> list[float]:
        begin = [clock() for clock in clocks.values()]
        work()
        return [clock() - since for clock, since in zip(clocks.values(), begin, strict=True)]

    end = time.monotonic() + 1.4 * seconds
    while time.monotonic() < end or len(ratios) < _FEWEST_PAIRS:
        if len(ratios) % 2:
            above, below = timed(one), timed(other)
        else:
            below, above = timed(other), timed(one)
        ratios.append([x / y for x, y in zip(above, below, strict=True)])
    del ratios[: len(ratios) // 4]
    medians = map(statistics.median, zip(*ratios, strict=True))
    found = {f"{clock}_ratio": median for clock, median in zip(clocks, medians, strict=True)}
    return {**found, "pairs": float(len(ratios))}
