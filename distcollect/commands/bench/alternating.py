"""Two ways to collect, batch by batch in turn within one process.

What else the machine does, and the clock rate it gives, change from one tenth of a second to the
next by more than the difference that is looked for. Two batches that follow each other share it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from distcollect.commands.bench.bare import BareLoop
from distcollect.commands.bench.contenders import Values, make_sync
from distcollect.commands.bench.workloads import WORKLOADS

_FEWEST_PAIRS = 8


def run_beside_bare(seconds: float, *, name: str) -> Values:
    """Frames/s of SyncDataCollector over the bare loop's."""
    torch.set_num_threads(1)
    workload = WORKLOADS[name]
    bare = BareLoop(workload).batches()
    with make_sync(workload, workload.make_policy()) as collector:
        ratio, pairs = ratio_of_pairs(
            lambda: next(bare), collector.next, seconds, clock=time.perf_counter
        )
    return {"speed_ratio": ratio, "pairs": pairs}


def ratio_of_pairs(
    one: Callable[[], object],
    other: Callable[[], object],
    seconds: float,
    clock: Callable[[], float],
) -> tuple[float, float]:
    """What ``one`` takes over what ``other`` takes, by ``clock``: the median of pairs.

    Returns:
        The median, and of how many pairs; the first quarter warmed up and is left out.
    """
    ratios: list[float] = []

    def timed(work: Callable[[], object]) -> float:
        begin = clock()
        work()
        return clock() - begin

    end = time.monotonic() + 1.4 * seconds
    while time.monotonic() < end or len(ratios) < _FEWEST_PAIRS:
        if len(ratios) % 2:
            above, below = timed(one), timed(other)
        else:
            below, above = timed(other), timed(one)
        ratios.append(above / below)
    del ratios[: len(ratios) // 4]
    return statistics.median(ratios), float(len(ratios))
