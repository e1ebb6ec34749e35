"""Traces of workers that are threads: which spans they hold, on one time line."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import cloudpickle
import pytest
from helpers.loopback_pool import loopback_collector
from helpers.policies import GreedyPolicy
from helpers.trace_checks import (
    assert_answered,
    assert_named,
    assert_nested,
    fetches,
    load,
    spans,
)

import distcollect as dc
from distcollect.rollout.header import Span
from distcollect.telemetry.step_timer import StepTimer
from distcollect.telemetry.trace import STEPS, WEIGHTS

SKEW = 5 * 86_400 * 1_000_000_000  # ns: the clock of a host that started days earlier


cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers can't import test modules


def test_workers_are_on_the_trainers_time_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = StepTimer.spans

    def on_another_host(recorder: StepTimer) -> tuple[Span, ...]:
        return tuple((thread, name, b - SKEW, e - SKEW) for thread, name, b, e in noted(recorder))

    monkeypatch.setattr(StepTimer, "spans", on_another_host)
    path = tmp_path / "trace.json"
    collector = loopback_collector(
        "CartPole-v1",
        GreedyPolicy(),
        frames_per_batch=32,
        num_workers=2,
        sync=True,
        trace=path,
        monitor=dc.Monitor(view=False),
    )
    with collector:
        for _ in range(3):
            collector.next()
            collector.update_policy_weights_()
        collector.next()
    events = load(path)
    assert_named(events, {"trainer", "worker 0", "worker 1"})
    assert_nested(events)
    for worker in ("worker 0", "worker 1"):
        assert_answered(events, worker)
        steps = [name for name, _, _ in spans(events, worker, STEPS)]
        assert steps.count("rollout") == steps.count("hand over") == 4
        # The first rollouts are there whole, 16 steps each.
        assert steps.count("policy") == steps.count("env") == 4 * 16
        assert [name for name in steps if "swap" in name] == [
            f"swap in version {version}" for version in (1, 2, 3)
        ]
        received = [name for name, _, _ in spans(events, worker, WEIGHTS)]
        assert received == [f"receive version {version}" for version in (1, 2, 3)]
        assert len(fetches(events, worker)) == 4
    sent = [name for name, _, _ in spans(events, "trainer", WEIGHTS) if "push" in name]
    assert sent == [f"push version {version}" for version in (1, 2, 3)]
    batches = spans(events, "trainer", "batches")
    assert {name for name, _, _ in batches} >= {"train", "collect", "weights", "assemble"}
    # A time line has no gaps.
    for (_, _, end), (_, begin, _) in pairwise(batches):
        assert begin == end
    assert events[-1]["name"] == "end of the trace"
