"""Traces: the spans of a rollout by another clock, and the file."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path

import cloudpickle
import pytest
from helpers.trace_checks import (
    assert_answered,
    assert_named,
    assert_nested,
    load,
    spans,
)
from helpers.waiting import eventually

import distcollect as dc
from distcollect.telemetry.trace import STEPS, WEIGHTS, Trace

SKEW = 5 * 86_400 * 1_000_000_000  # ns: the clock of a host that started days earlier
US = 1000  # ns


cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers can't import test modules


def test_spans_are_nested_even_if_clocks_drift_within_a_rollout(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "trace.json", clock=lambda: 0)

    def theirs(at: int) -> int:
        return SKEW + at + at // 1000  # 1000 ppm

    for number in range(20):
        asked, heard = number * 10**9, (number + 1) * 10**9 - 50 * US
        steps = [asked + 50 * US + step * 10**6 for step in range(1000)]
        noted = [(STEPS, "rollout", theirs(steps[0]), theirs(steps[-1]))]
        noted += [(STEPS, "env", theirs(a), theirs(b)) for a, b in pairwise(steps)]
        received = [(WEIGHTS, "receive", theirs(at), theirs(at + 10**6)) for at in steps[::100]]
        trace.rollout((0, 0), noted + received, asked, heard)
    trace.close()
    events = load(tmp_path / "trace.json")
    assert_nested(events)
    assert_answered(events, "worker 0")
    assert len(spans(events, "worker 0", WEIGHTS)) == 200


def test_the_first_rollouts_are_noted_whole_and_then_every_64th(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with dc.SyncDataCollector(
        "CartPole-v1", frames_per_batch=8, monitor=dc.Monitor(trace=path, view=False)
    ) as collector:
        for _ in range(70):
            collector.next()
    events = load(path)
    assert_named(events, {"trainer"})
    assert_nested(events)
    steps = spans(events, "trainer", STEPS)
    rollouts = [(begun, ended) for name, begun, ended in steps if name == "rollout"]
    num_envs = [
        sum(name == "env" and begun <= at < ended for name, at, _ in steps)
        for begun, ended in rollouts
    ]
    assert num_envs[:4] == [8] * 4
    assert [number for number, count in enumerate(num_envs) if count] == [0, 1, 2, 3, 64]
    collecting = [span for span in spans(events, "trainer", "batches") if span[0] == "collect"]
    assert len(collecting) == len(rollouts) == 70


def test_the_file_is_bounded_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trace = Trace(tmp_path / "trace.json", max_events=50, clock=lambda: 0)
    for number in range(100):
        trace.activity("train", number * US, (number + 1) * US)
    trace.fetched(0, 0, US)
    trace.close()
    events = load(tmp_path / "trace.json")
    assert len(events) == 51
    assert events[-1]["name"].startswith("the trace is full")
    assert events[-1]["ts"] == max(event.get("ts", 0) for event in events)
    assert "is full, and ends here; the run goes on" in caplog.text


def test_what_is_left_of_a_killed_run_can_be_read(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "trace.json", clock=lambda: 0)
    trace.activity("train", 0, US)
    trace.activity("collect", US, 2 * US)
    eventually(lambda: "collect" in (tmp_path / "trace.json").read_text())
    events = json.loads((tmp_path / "trace.json").read_text() + "]")  # only the end is missing
    assert [name for name, *_ in spans(events, "trainer", "batches")] == ["train", "collect"]
    trace.close()


def test_a_disk_that_is_full_ends_the_trace_only(caplog: pytest.LogCaptureFixture) -> None:
    trace = Trace("/dev/full")
    for number in range(100):
        trace.activity("train", number * US, (number + 1) * US)
    trace.close()
    assert caplog.text.count("ends here; the run goes on") == 1
