"""What it costs to count where the time goes, and to tell of it."""

from __future__ import annotations

import io
import json
import statistics
import time

import torch
from torch import nn

from distcollect import Monitor, SyncDataCollector
from distcollect.commands.bench.alternating import ratio_of_pairs
from distcollect.commands.bench.contenders import Values, make_sync
from distcollect.commands.bench.workloads import WORKLOADS, Workload
from distcollect.rollout.slab import Slab
from distcollect.telemetry.bottleneck import find_bottleneck
from distcollect.telemetry.recorder import StatsRecorder
from distcollect.telemetry.step_timer import StepTimer

_NEVER = 1 << 62
_DISPLAY_EVERY_S = 2.0


class _NoMeter(StepTimer):
    """StepCounter nothing."""

    def begin(self) -> None:
        self.due = _NEVER

    def end(self) -> None:
        """Nothing."""

    def collected(self, slab: Slab) -> None:
        """Nothing."""


class _NoBook(StatsRecorder):
    """StepCounter nothing but what batches it was told of, which is next to nothing."""

    def does(self, activity: object) -> None:
        """Nothing."""

    def collected(self, header: object, asked_at: int | None = None) -> None:
        """Nothing."""

    def delivered(self, batch: object) -> None:
        """Nothing."""


def run_counting(seconds: float, *, name: str) -> Values:
    """CPU of a batch with all that is counted over that of one without."""
    torch.set_num_threads(1)
    workload = WORKLOADS[name]
    # Another one would choose other actions, and so have episodes of another length.
    policy = workload.make_policy()
    with _collector(workload, policy) as counting, _collector(workload, policy) as other:
        other._stats_recorder = _NoBook()  # noqa: SLF001 - users can't turn it off
        other._engine.step_timer = _NoMeter(workload.num_envs)  # noqa: SLF001
        ratio, pairs = ratio_of_pairs(counting.next, other.next, seconds, clock=time.thread_time)
    return {"cpu_ratio": ratio, "pairs": pairs}


def _collector(workload: Workload, policy: nn.Module) -> SyncDataCollector:
    return make_sync(workload, policy, monitor=Monitor(view=False))


def run_telling(seconds: float) -> Values:
    """CPU of the thread that draws the display and writes a line of JSON, as a share of a core."""
    from rich.console import Console  # noqa: PLC0415 - not needed by others

    from distcollect.telemetry.display import rendered  # noqa: PLC0415

    workload = WORKLOADS["cartpole-16"]
    with _collector(workload, workload.make_policy()) as collector:
        collector.next()
        console = Console(file=io.StringIO(), force_terminal=True, width=100, height=40)
        costs = []
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            begin = time.thread_time()
            stats = collector.stats()
            console.print(rendered(stats, 40))
            json.dumps({**stats.as_dict(), "bottleneck": str(find_bottleneck(stats))})
            costs.append(time.thread_time() - begin)
    return {"core_share": statistics.median(costs) / _DISPLAY_EVERY_S}
