"""Compares two ways to collect: a batch of one, then a batch of the other, in one process.

The machine's load and clock rate change within tenths of a second by more than the difference that
is to be measured. They are about the same for two batches that follow each other.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

import distcollect as dc
from benchmarks.bare import bare_loop
from benchmarks.contenders import arguments
from benchmarks.items import Values
from benchmarks.workloads import WORKLOADS

_FEWEST_PAIRS = 8


def run_beside_bare(seconds: float, *, name: str) -> Values:
    """Frames/s of SyncDataCollector over the bare loop's."""
    torch.set_num_threads(1)
    bare = bare_loop(WORKLOADS[name])
    with dc.SyncDataCollector(**arguments(WORKLOADS[name])) as collector:
        ratio, pairs = ratio_of_pairs(
            bare.rollout, collector.next, seconds, clock=time.perf_counter
        )
    return {"speed_ratio": ratio, "pairs": pairs}


def run_seeded(seconds: float, *, name: str) -> Values:
    """Time of a batch of a seeded SyncDataCollector over that of one without a seed."""
    torch.set_num_threads(1)
    # Two policies would choose other actions, and their episodes would have other lengths.
    given = arguments(WORKLOADS[name])
    with dc.SyncDataCollector(**given) as seeded, dc.SyncDataCollector(**given) as other:
        seeded.set_seed(1)
        ratios, pairs = ratios_of_pairs(
            seeded.next, other.next, seconds, [time.perf_counter, time.process_time]
        )
    return {"time_ratio": ratios[0], "cpu_ratio": ratios[1], "pairs": pairs}


def run_ray(seconds: float, *, name: str) -> Values:
    """Frames/s of two workers that Ray starts over that of two local ones.

    In sync mode: so the workers of one collector do nothing while the other one's collect.
    """
    workload = WORKLOADS[name]
    given = arguments(workload, num_workers=2, sync=True)
    given["frames_per_batch"] *= 2
    ray = {"num_cpus": 2, "include_dashboard": False}
    with (
        dc.RPCDataCollector(**given) as local,
        dc.RayDataCollector(**given, ray_init_config=ray) as placed,
    ):
        ratio, pairs = ratio_of_pairs(local.next, placed.next, seconds, clock=time.perf_counter)
    return {"speed_ratio": ratio, "pairs": pairs}


def ratio_of_pairs(
    one: Callable[[], object],
    other: Callable[[], object],
    seconds: float,
    clock: Callable[[], float],
) -> tuple[float, float]:
    """The same as :func:`ratios_of_pairs`, by one clock."""
    [ratio], pairs = ratios_of_pairs(one, other, seconds, [clock])
    return ratio, pairs


def ratios_of_pairs(
    one: Callable[[], object],
    other: Callable[[], object],
    seconds: float,
    clocks: Sequence[Callable[[], float]],
) -> tuple[list[float], float]:
    """The duration of ``one`` over that of ``other``, by each clock.

    Returns:
        For each clock the median over pairs, and the number of pairs. The first quarter is a
        warm-up and is left out.
    """
    ratios: list[list[float]] = []

    def timed(work: Callable[[], object]) -> list[float]:
        begin = [clock() for clock in clocks]
        work()
        return [clock() - since for clock, since in zip(clocks, begin, strict=True)]

    end = time.monotonic() + 1.4 * seconds
    while time.monotonic() < end or len(ratios) < _FEWEST_PAIRS:
        if len(ratios) % 2:
            above, below = timed(one), timed(other)
        else:
            below, above = timed(other), timed(one)
        ratios.append([x / y for x, y in zip(above, below, strict=True)])
    del ratios[: len(ratios) // 4]
    return [statistics.median(column) for column in zip(*ratios, strict=True)], float(len(ratios))
