"""What it costs to collect statistics."""

from __future__ import annotations

import time

import torch

from benchmarks.alternating import in_turn
from benchmarks.contenders import arguments
from benchmarks.items import Values
from benchmarks.workloads import WORKLOADS
from distcollect import SyncDataCollector
from distcollect.rollout.slabs import AnySlab
from distcollect.telemetry.recorder import StatsRecorder
from distcollect.telemetry.step_timer import StepTimer

_NEVER = 1 << 62


class _NoStepTimer(StepTimer):
    """Measures nothing."""

    def begin(self) -> None:
        self.due = _NEVER

    def end(self) -> None:
        """Do nothing."""

    def collected(self, slab: AnySlab, rests: tuple[int, ...] = ()) -> None:
        """Do nothing."""


class _NoStatsRecorder(StatsRecorder):
    """Records nothing."""

    def switch_to(self, activity: object) -> None:
        """Do nothing."""

    def collected(self, header: object, asked_at: int | None = None) -> None:
        """Do nothing."""

    def delivered(self, batch: object, at: int | None = None) -> None:
        """Do nothing."""


def run_counting(seconds: float, *, name: str) -> Values:
    """CPU time of a batch with statistics over that of a batch without."""
    torch.set_num_threads(1)
    # Two policies would choose other actions, and their episodes would have other lengths.
    given = arguments(WORKLOADS[name])
    with SyncDataCollector(**given) as counting, SyncDataCollector(**given) as other:
        other._stats_recorder = _NoStatsRecorder()
        other._backend.engine.step_timer = _NoStepTimer(WORKLOADS[name].num_envs)
        return in_turn(counting.next, other.next, seconds, cpu=time.thread_time)
