"""Metrics of episodes: what a user names in ``Monitor(metrics=...)``."""

from __future__ import annotations

import json
import math
from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from helpers.counting_envs import IN_PROCESS_KINDS, CountingMaker
from prometheus_client import CollectorRegistry, generate_latest

import distcollect as dc
from distcollect.commands.report.history import history_of
from distcollect.commands.report.page import page
from distcollect.results import EpisodeStats, Evaluation, EvaluationStats, Stats, WorkerStats
from distcollect.rollout.header import Header, WorkReport
from distcollect.telemetry.display import log_line
from distcollect.telemetry.exporters import StatsCollector
from distcollect.telemetry.recorder import StatsRecorder

NAN = math.nan


def means_of(
    collector: Any, metrics: dict[str, tuple[str, ...]], *, drifts_apart: bool = False
) -> tuple[Any, dict[str, Any]]:
    """The means that the statistics have, and those over the episodes in the batches."""
    values: dict[str, list[float]] = {name: [] for name in metrics}
    num_frames: Counter[int] = Counter()
    with collector:
        for batch in collector:
            rows = batch.reshape(-1)
            ended = rows["next", "done"].squeeze(-1) & ~rows["collector", "faulted"]
            num_frames.update(rows["collector", "traj_ids"].tolist())
            if drifts_apart:  # what is left of an episode, after dropped frames, is none
                delivered = [num_frames[each] for each in rows["collector", "traj_ids"].tolist()]
                ended &= torch.tensor(delivered) == rows["next", "ratio"].reshape(-1) * 4
            for name, key in metrics.items():
                values[name] += rows[ended][key].reshape(-1).double().tolist()
    assert 10 < min(map(len, values.values())) <= max(map(len, values.values())) <= 100
    means = {name: float(np.mean(each)) for name, each in values.items()}
    return collector.stats(), means


@pytest.mark.parametrize("kind", IN_PROCESS_KINDS)
def test_values_are_those_of_the_last_frames(kind: str) -> None:
    metrics = {
        "steps": ("next", "ratio"),
        "episodes": ("next", "lap"),
        "chosen": ("action",),
        "reward": ("next", "reward"),
        "ended": ("next", "terminated"),
    }
    collector = dc.SyncDataCollector(
        CountingMaker(kind, 3),
        frames_per_batch=3 * 7,
        total_frames=3 * 7 * 8,
        envs_per_worker=3 if kind.startswith("plain") else 1,
        info_keys=["lap", "ratio"],
        monitor=dc.Monitor(metrics=metrics, view=False),
    )
    stats, means = means_of(collector, metrics, drifts_apart=kind.startswith("native-next"))
    assert stats.episodes.metrics == pytest.approx(means)
    assert stats.workers[0].metrics == pytest.approx(means)


@pytest.mark.parametrize("kind", ["plain", "sync-disabled"])
def test_evaluations_have_them(kind: str) -> None:
    monitor = dc.Monitor(metrics={"steps": ("next", "ratio"), "late": ("next", "truncated")})
    with dc.SyncDataCollector(
        CountingMaker(kind, 3), frames_per_batch=6, info_keys=["ratio"], monitor=monitor
    ) as collector:
        found = collector.evaluate(9)
    assert len(set(found.lengths.tolist())) > 2
    assert (found.metrics["steps"] * 4 == found.lengths).all()
    assert 0 < found.metrics["late"].mean() < 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", ["batched", "not of tensors only"])
def test_values_of_torchrl_envs(kind: str) -> None:
    zoo = pytest.importorskip("helpers.torchrl_envs", reason="torchrl is not installed")
    make = partial(zoo.Counter, batch_size=(4,)) if kind == "batched" else zoo.talking
    metrics = {
        "count": ("next", "inner", "wide"),
        "before": ("inner", "wide"),
        "reward": ("next", "reward"),
        "ended": ("next", "terminated"),
    }
    collector = dc.SyncDataCollector(
        make,
        frames_per_batch=20,
        total_frames=160,
        monitor=dc.Monitor(metrics=metrics, view=False),
    )
    stats, means = means_of(collector, metrics)
    assert stats.episodes.metrics == pytest.approx(means)


def test_the_last_hundred_episodes_of_each_worker_and_of_all() -> None:
    recorder = StatsRecorder(lambda: 0, metrics=["success"])

    def collected(worker_id: int, *values: float) -> None:
        of = {"success": values, "of another trainer": values}
        ends = (1.0,) * len(values)
        work = WorkReport(returns=ends, lengths=(1,) * len(values), metrics=of)
        recorder.collected(Header(worker_id, 0, 0, 10, 10, 100, (0, 0), work=work))

    def snapshot() -> Stats:
        return recorder.snapshot(
            Stats(), states={0: "ready", 1: "ready"}, processes={}, ready={}, ledger=None
        )

    assert repr(snapshot().episodes.metrics) == "{'success': nan}"
    collected(0, *[0.0] * 60, NAN)  # an episode that does not count
    collected(1, *[1.0] * 60)
    stats = snapshot()
    assert stats.episodes.metrics == {"success": 60 / 99}
    assert [w.metrics["success"] for w in stats.workers.values()] == [0.0, 1.0]
    text = json.dumps({"from_the_future": 1, **stats.as_dict()}, allow_nan=False)
    again = Stats.from_dict(json.loads(text))
    assert again.episodes == stats.episodes
    assert again.workers == stats.workers


STATS = Stats(
    frames=10,
    episodes=EpisodeStats(3, 1.0, 2.0, 1.0, 1.0, {"success": 0.25, "late": NAN}),
    evaluation=EvaluationStats(2, 1.5, 2.0, 1.0, 2.0, {"success": 0.75, "late": NAN}, 7),
    workers={1: WorkerStats(metrics={"success": 0.5, "late": NAN})},
)


def test_where_they_are_shown() -> None:
    assert "length 2, success 0.25, late nan" in log_line(STATS)
    registry = CollectorRegistry()
    registry.register(StatsCollector(lambda: STATS))
    text = generate_latest(registry).decode()
    assert '\ndistcollect_episode_metric{metric="success"} 0.25\n' in text
    assert '\ndistcollect_evaluation_metric{metric="success"} 0.75\n' in text
    assert "\ndistcollect_evaluation_return 1.5\n" in text
    assert '\ndistcollect_worker_episode_metric{metric="success",worker="1"} 0.5\n' in text
    assert "late" not in text


def test_the_report_has_a_curve_of_each() -> None:
    line = {"time": 1e9, "bottleneck": "", **STATS.as_dict()}
    lines = [{**line, "elapsed_s": float(at), "time": 1e9 + at} for at in range(4)]
    html = page(history_of(lines, per_point=2), "run")
    assert "<h2>success: Mean metric of the last hundred episodes</h2>" in html
    assert "<title>success: 0.25 after" in html
    assert "<h2>success: Mean metric of the newest evaluation</h2>" in html


@pytest.mark.parametrize(
    ("metrics", "says"),
    [
        ({"success": ("next", "sucess")}, r"\('next', 'sucess'\).*They have .*\('action',\)"),
        ({"all": ("next", "observation")}, "no such entry with one number"),
    ],
)
def test_entries_that_frames_do_not_have(metrics: Any, says: str) -> None:
    monitor = dc.Monitor(metrics=metrics, view=False)
    with pytest.raises(dc.ArgumentError, match=f"(?s){says}.*info_keys"):
        dc.SyncDataCollector("CartPole-v1", frames_per_batch=10, monitor=monitor)


def test_the_summary_of_an_evaluation_has_those_that_count() -> None:
    played = Evaluation(
        returns=torch.tensor([1.0, 2.0], dtype=torch.float64),
        lengths=torch.tensor([3, 4]),
        policy_version=torch.tensor([5, 5]),
        worker_id=torch.tensor([0, 1]),
        metrics={"success": torch.tensor([1.0, NAN], dtype=torch.float64)},
    )
    summary = EvaluationStats(2, 1.5, 3.5, 1.0, 2.0, {"success": 1.0}, policy_version=5)
    assert repr(played.summary()) == repr(summary)  # NaN is not equal to itself
