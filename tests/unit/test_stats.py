"""What the statistics count, and how they are shown."""

from __future__ import annotations

import gc
import math
import re
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.envs import CountdownEnv
from helpers.paths import ROOT
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import distcollect as dc
from distcollect.results import (
    EpisodeStats,
    Frames,
    Lags,
    LedgerReport,
    Stats,
    TrainerTimes,
    WorkerStats,
    WorkerTimes,
)
from distcollect.rollout.header import NO_WORK, Header, WorkReport
from distcollect.rollout.layout import Layout
from distcollect.rollout.slab import Slab
from distcollect.telemetry.cells import rest_between_cells
from distcollect.telemetry.exporters import StatsCollector
from distcollect.telemetry.recorder import StatsRecorder
from distcollect.telemetry.step_timer import Episodes

S = 1_000_000_000  # ns


def test_episodes_are_those_of_a_loop_over_all_frames() -> None:
    rng = np.random.default_rng(0)
    n, steps = 3, 6
    episodes = Episodes(n)
    next_id = n
    ids = np.arange(n)
    returns, lengths = np.zeros(n), np.zeros(n, int)
    for number in range(60):
        slab = Slab(Layout((n,), (), (), ()), steps)
        slab.clear()
        expected = []
        # Some rollouts are cut short, sometimes before a row has any frame.
        real = rng.integers(0, steps + 1, n) if number % 3 == 0 else np.full(n, steps)
        slab.num_frames = int(real.sum())
        for row in range(n):
            slab.traj_ids[row] = -1
            slab.reward[row] = 0
            for step in range(real[row]):
                reward = float(rng.integers(1, 9))
                slab.traj_ids[row, step] = ids[row]
                slab.reward[row, step] = reward
                returns[row] += reward
                lengths[row] += 1
                fate = rng.choice(["on", "terminated", "truncated", "faulted", "reset"], p=_FATES)
                if fate == "on":
                    continue
                if fate != "reset":
                    (slab.terminated if fate == "terminated" else slab.truncated)[row, step] = True
                    slab.faulted[row, step] = fate == "faulted"
                if fate in ("terminated", "truncated"):
                    expected.append((returns[row], lengths[row]))
                ids[row], next_id = next_id, next_id + 1
                returns[row] = lengths[row] = 0
        found = episodes.add(slab)
        assert list(zip(*found, strict=True)) == expected


_FATES = [0.8, 0.07, 0.06, 0.03, 0.04]


def test_a_reward_that_is_no_number_spoils_no_other_episode() -> None:
    episodes = Episodes(1)
    found = []
    for number, reward in enumerate((1.0, math.nan, math.inf, -math.inf, 3.0)):
        slab = Slab(Layout((1,), (), (), ()), 2)
        slab.clear()
        slab.num_frames = 2
        slab.traj_ids[0] = number
        slab.reward[0] = reward
        slab.terminated[0, 1] = True
        found += episodes.add(slab)[0]
    assert repr(found) == "[2.0, nan, inf, -inf, 6.0]"
    stats_recorder = StatsRecorder(Clock())
    stats_recorder.collected(
        header(work=WorkReport(S, returns=(math.inf, -math.inf, 1.0), lengths=(1, 1, 1)))
    )
    told = snapshot(stats_recorder).episodes
    assert (told.count, told.min_return, told.max_return) == (3, -math.inf, math.inf)
    assert math.isnan(told.mean_return)


class Clock:
    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


def header(
    worker_id: int = 0, incarnation: int = 0, work: WorkReport = NO_WORK, **kw: Any
) -> Header:
    return Header(worker_id, incarnation, 0, 10, 10, 100, (0, 0), work=work, **kw)


def snapshot(stats_recorder: StatsRecorder, ledger: LedgerReport | None = None) -> Stats:
    return stats_recorder.snapshot(
        Stats(collector="X"),
        states={0: "ready"},
        processes={0: (7, "host-a")},
        ready={0: 2},
        ledger=ledger,
    )


def test_the_trainers_time_is_split_by_what_it_did() -> None:
    clock = Clock()
    stats_recorder = StatsRecorder(clock)
    assert snapshot(stats_recorder).trainer == TrainerTimes()
    for activity, seconds in (
        ("collect", 4),
        ("transfer", 2),
        ("assemble", 1),
        ("train", 2),
    ):
        stats_recorder.switch_to(activity)
        clock.now += seconds * S
    with stats_recorder.publishing():
        clock.now += S
    assert snapshot(stats_recorder).trainer == TrainerTimes(0.2, 0.4, 0.1, 0.2, 0.1)
    stats_recorder.end()
    clock.now += 100 * S
    stats = snapshot(stats_recorder)
    assert stats.trainer == TrainerTimes(0.2, 0.4, 0.1, 0.2, 0.1)
    assert stats.elapsed_s == 10


def test_between_the_end_of_a_cell_and_the_next_batch_no_time_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither as the trainer's work, nor as a wait of the workers, nor in the rates."""
    cell_ended: list[Callable[[object], None]] = []
    events = SimpleNamespace(register=lambda name, call: cell_ended.append(call))
    shell = SimpleNamespace(events=events)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    clock = Clock()
    stats_recorder = StatsRecorder(clock)
    rest_between_cells(stats_recorder)

    def batch(wait_s: int) -> None:
        stats_recorder.switch_to("collect")
        clock.now += 3 * S
        stats_recorder.collected(header(work=WorkReport(3 * S, wait_ns=wait_s * S)))
        stats_recorder.delivered([(0, 0, 30)])
        stats_recorder.switch_to("train")

    batch(0)
    clock.now += S
    batch(1)
    cell_ended[0](object())
    before = snapshot(stats_recorder)
    clock.now += 1000 * S
    assert snapshot(stats_recorder) == before
    assert before.elapsed_s == 7
    batch(1000)
    clock.now += S
    batch(1)
    stats_recorder.end()
    stats = snapshot(stats_recorder)
    assert stats.elapsed_s == 14
    assert stats.trainer == TrainerTimes(train=2 / 14, collect=12 / 14)
    assert stats.times.wait == 2 / 14
    assert stats.mean_frames_per_s == 120 / 14
    assert stats.frames_per_s > 5


@pytest.mark.parametrize(
    ("step_s", "frames", "pause_s", "rate", "mean"),
    [
        pytest.param(1, [10] * 50 + [20] * 50, 0, 20, 15, id="of the last ten seconds"),
        pytest.param(1, [10] * 50 + [20] * 50, 40, 4, 1500 / 140, id="none came lately"),
        pytest.param(0.1, [10], 4.9, 2, 2, id="the first batch"),
        pytest.param(60, [600] * 4, 0, 10, 10, id="batches that take long"),
    ],
)
def test_rates_are_of_late_and_on_average(
    step_s: float, frames: list[int], pause_s: float, rate: float, mean: float
) -> None:
    clock = Clock()
    stats_recorder = StatsRecorder(clock)
    stats_recorder.switch_to("collect")
    for number in frames:
        clock.now += int(step_s * S)
        stats_recorder.delivered([(0, 0, number)])
    clock.now += int(pause_s * S)
    stats = snapshot(stats_recorder)
    assert stats.frames_per_s == stats.workers[0].frames_per_s == pytest.approx(rate)
    assert stats.mean_frames_per_s == pytest.approx(mean)


def test_a_replaced_process_adds_to_its_worker() -> None:
    stats_recorder = StatsRecorder(Clock())
    stats_recorder.joined(0, 0)
    stats_recorder.collected(
        header(work=WorkReport(8 * S, 4 * S, 2 * S, 1 * S, 2 * S, 4 * S, (1.0, 3.0), (5, 7)))
    )
    stats_recorder.joined(0, 1)
    stats_recorder.collected(
        header(incarnation=1, work=WorkReport(8 * S, 4 * S, 2 * S, 1 * S, 2 * S, 4 * S))
    )
    lost = Frames(20, 10, {"worker_lost": 10}, at_most=7, env_faults=3)
    stats = snapshot(stats_recorder, LedgerReport({0: lost}, lost))
    assert stats.times == WorkerTimes(0.4, 0.2, 0.1, pytest.approx(0.1), 0.2, 0.0, 0.5)
    assert stats.num_restarts == stats.workers[0].num_restarts == 1
    assert stats.lost == stats.workers[0].lost == {"worker_lost": 10}
    assert stats.may_be_lost == stats.workers[0].may_be_lost == 7
    assert stats.num_env_faults == stats.workers[0].num_env_faults == 3
    assert stats.episodes == EpisodeStats(2, 2.0, 6.0, 1.0, 3.0)


def test_lags() -> None:
    lags = Lags({0: 50, 1: 30, 4: 20})
    assert (lags.mean, lags.max) == (1.1, 4)
    assert (Lags().mean, Lags().max) == (0.0, 0)


def test_remaining_time() -> None:
    assert Stats(frames=100, total_frames=400, frames_per_s=10).remaining_s == 30
    assert Stats(frames=100, frames_per_s=10).remaining_s is None
    assert Stats(frames=100, total_frames=400).remaining_s is None
    # Half of each 40 frames are padding, and 200 belong to an earlier run.
    lag, known = Lags({0: 15, 1: 5}), {"resumed_frames": 200, "total_frames": 400}
    half = Stats(frames=240, lag=lag, frames_per_s=10, **known)
    assert half.remaining_s == 160 / 20


def test_a_dropped_collector_ends_what_is_told() -> None:
    told: list[Stats] = []
    some = threading.Event()

    def tell(stats: Stats) -> None:
        told.append(stats)
        if stats.frames:  # it did not get the batch that was being made
            some.set()

    monitor = dc.Monitor(callback=tell, every_s=0.01, view=False)
    collector = dc.SyncDataCollector(CountdownEnv, frames_per_batch=10, monitor=monitor)
    collector.next()
    assert some.wait(20)
    thread = next(t for t in threading.enumerate() if t.name == "distcollect-monitor")
    del collector
    gc.collect()
    thread.join(20)
    assert not thread.is_alive()
    assert told[-1].ended
    assert told[-1].frames == 10


def test_prometheus_reads_each_metric_and_the_page_names_it() -> None:
    workers = {0: WorkerStats(times=WorkerTimes(wait=0.5), metrics={"success": 1.0})}
    stats = Stats(workers={**workers, 1: WorkerStats()}, logged={"loss": 0.25, "bad": math.nan})
    registry = CollectorRegistry()
    registry.register(StatsCollector(lambda: stats))
    families = list(text_string_to_metric_families(generate_latest(registry).decode()))
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }
    assert samples["distcollect_frames_total",] == 0
    assert samples["distcollect_worker_share", "wait", "0"] == 0.5
    assert samples["distcollect_trainer_share", "train"] == 0
    assert samples["distcollect_logged", "loss"] == 0.25
    assert math.isnan(samples.pop(("distcollect_logged", "bad"))), "an alert is to see it"
    # A server keeps one of two that are equal.
    assert len(samples) + 1 == sum(len(family.samples) for family in families)
    assert len({family.name for family in families}) == len(families)
    assert all(family.documentation and family.type in ("counter", "gauge") for family in families)
    assert all(map(math.isfinite, samples.values()))
    text = (ROOT / "distcollect/docs/monitoring.md").read_text()
    of_run, of_workers = re.findall(r"^distcollect_.*\n((?:    .*\n)+)", text, re.MULTILINE)
    of = {"distcollect_worker_": of_workers, "distcollect_": of_run}
    named = [
        f"{start}{name}"
        for start, names in of.items()
        for name in re.findall(r"\w+(?=[,{\n])", names)
    ]
    shown = [f"{each.name}_total" if each.type == "counter" else each.name for each in families]
    assert sorted(named) == sorted(shown)
