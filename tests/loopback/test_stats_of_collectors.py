"""The statistics of running collectors."""

from __future__ import annotations

import io
import json
import re
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from helpers.envs import CountdownEnv, StumblingEnv
from helpers.loopback_pool import loopback_collector
from helpers.policies import ConstantPolicy
from helpers.waiting import eventually
from prometheus_client import CollectorRegistry
from rich.console import Console

import distcollect as dc
from distcollect.commands.main import main
from distcollect.results import Stats
from distcollect.telemetry.display import log_line, rendered
from distcollect.telemetry.exporters import StatsCollector


def drawn(stats: Stats) -> str:
    console = Console(file=io.StringIO(), width=110)
    console.print(rendered(stats, height=40))
    return console.file.getvalue()


@pytest.mark.parametrize("kind", [None, True, False], ids=["in process", "sync", "async"])
def test_stats_of_a_collector(kind: bool | None, tmp_path: Path) -> None:
    told: list[Stats] = []
    monitor = dc.Monitor(run_dir=tmp_path, callback=told.append, view=False)
    policy = ConstantPolicy()
    options: dict[str, Any] = {"frames_per_batch": 24, "total_frames": 240, "monitor": monitor}
    if kind is None:
        collector: Any = dc.SyncDataCollector(CountdownEnv, policy, envs_per_worker=2, **options)
    else:
        collector = loopback_collector(
            CountdownEnv, policy, num_workers=2, envs_per_worker=2, sync=kind, **options
        )
    with collector:
        assert collector.stats().elapsed_s == 0
        assert "nothing" in str(collector.bottleneck()).lower()
        envs = "2 envs" if kind is None else "2 of 2 workers ready, 2 envs each"
        begun = (
            f"{type(collector).__name__}(running, {envs}, 0 of 240 frames (0%), policy_version 0)"
        )
        assert str(collector) == begun
        for _ in collector:
            collector.update_policy_weights_(policy)
    stats = collector.stats()
    assert "(closed, " in str(collector)
    assert ", 240 of 240 frames (100%), policy_version 10)" in str(collector)
    assert stats.collector == type(collector).__name__
    assert stats.frames == stats.delivered == 240
    assert stats.ended
    assert sum(stats.lag.frames.values()) == 240
    assert sum(worker.frames for worker in stats.workers.values()) == 240
    assert sum(vars(stats.trainer).values()) == pytest.approx(1)
    times = stats.times
    parts = (times.env, times.policy, times.swap, times.other, times.wait)
    assert sum(parts) == pytest.approx(1)
    assert times.env > 0
    assert times.policy > 0
    # 240 frames of at most four envs, which may have collected ahead.
    episodes = stats.episodes
    assert 240 // 5 - 4 <= episodes.count <= (240 + 4 * 24) // 5
    assert (episodes.mean_return, episodes.mean_length) == (10.0, 5.0)
    assert (stats.num_bytes > 0) == (kind is not None)
    assert stats.sync == (kind is not False)
    # Reported at the end, whatever ``every_s`` is.
    assert [s.ended for s in told] == [True]
    (line,) = (tmp_path / "stats.jsonl").read_text().splitlines()
    assert Stats.from_dict(json.loads(line)) == told[0] == stats
    assert json.loads(line)["bottleneck"] == str(collector.bottleneck())


class StumblesFor:
    """The first ``times`` envs of a worker raise at their third step."""

    def __init__(self, times: int) -> None:
        self.left = {0: times, 1: 0}

    def __call__(self, context: dc.EnvContext) -> StumblingEnv:
        self.left[context.worker_id] -= 1
        return StumblingEnv(CountdownEnv(), 2 if self.left[context.worker_id] >= 0 else None)


@pytest.mark.parametrize("kind", [None, True, False], ids=["in process", "sync", "async"])
def test_envs_that_raise(kind: bool | None) -> None:
    options: dict[str, Any] = {"frames_per_batch": 24, "total_frames": 240}
    if kind is None:
        collector: Any = dc.SyncDataCollector(StumblesFor(2), **options)
    else:
        collector = loopback_collector(StumblesFor(2), num_workers=2, sync=kind, **options)
    begun = time.time()
    with collector:
        while not collector.stats().num_env_faults:
            collector.next()
        stats = collector.stats()
    assert stats.num_env_faults == stats.workers[0].num_env_faults == 2
    for fault in stats.env_faults:
        assert (fault.worker_id, fault.incarnation, fault.host) == (0, 0, socket.gethostname())
        assert begun - 1 < fault.time < time.time() + 1
        assert fault.message == "env 0 (CountdownEnv): step() raised RuntimeError: stumbled"
    assert len(stats.env_faults) == 2
    assert Stats.from_dict(json.loads(json.dumps(stats.as_dict()))).env_faults == stats.env_faults
    if kind is not None:
        assert collector.ledger.workers[0].env_faults == collector.ledger.total.env_faults == 2
        assert "env faults" in str(collector.ledger)


class StumblesInEvaluations(StumblesFor):
    """The first env that a worker has for evaluations raises at its third step."""

    def __init__(self) -> None:
        self.left = {0: 1, 1: 1}

    def __call__(self, context: dc.EnvContext) -> Any:
        return super().__call__(context) if context.for_evaluation else CountdownEnv()


@pytest.mark.parametrize("kind", ["in process", "with workers", "in the background"])
def test_an_evaluation_is_in_all_reports(kind: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "frames_per_batch": 24,
        "envs_per_worker": 2,
        "monitor": dc.Monitor(run_dir=tmp_path, view=False, every_s=3600),
    }
    if kind == "in process":
        collector: Any = dc.SyncDataCollector(StumblesInEvaluations(), **options)
    else:
        if kind == "in the background":
            options["evaluation"] = dc.EvaluationWorkers(num_episodes=6)
        collector = loopback_collector(StumblesInEvaluations(), num_workers=2, **options)
    with collector:
        collector.next()
        if kind == "in the background":
            while not (stats := collector.stats()).evaluation.count:
                collector.next()
            assert re.search(r"^1 +evaluating, 6 episodes ", drawn(stats), re.MULTILINE)
        else:
            assert collector.evaluate(6).env_faults == (fault := collector.stats().env_faults)
            assert "env 0 (CountdownEnv): step() raised RuntimeError: stumbled" in fault[0].message
        stats = collector.stats()
        eventually(lambda: '"mean_return":10.0' in (tmp_path / "stats.jsonl").read_text())
    newest = stats.evaluation
    assert (newest.count, newest.mean_return, newest.policy_version) == (6, 10.0, 0)
    assert 0 <= newest.age_s < 60
    assert sum(worker.num_evaluated for worker in stats.workers.values()) == 6
    assert stats.num_env_faults == len(stats.env_faults) == (2 if kind == "with workers" else 1)
    shown = f"evaluation of version 0, {timedelta(seconds=round(newest.age_s))} ago: 6 episodes"
    assert f"{shown}, return 10 (10 to 10), length 5" in log_line(stats)
    registry = CollectorRegistry()
    registry.register(StatsCollector(lambda: stats))
    assert registry.get_sample_value("distcollect_evaluation_return") == 10
    assert registry.get_sample_value("distcollect_evaluation_episodes") == 6
    *_, line = (tmp_path / "stats.jsonl").read_text().splitlines()
    assert json.loads(line)["evaluation"]["mean_return"] == 10
    assert main(["report", str(tmp_path)]) == 0
    assert "<h2>Mean return of the newest evaluation</h2>" in (tmp_path / "report.html").read_text()


class SlowInWorker2(CountdownEnv):
    may_go_on = threading.Event()

    def __init__(self, context: dc.EnvContext) -> None:
        super().__init__()
        self.is_slow = context.worker_id == 2

    def step(self, action: Any) -> Any:
        assert not self.is_slow or self.may_go_on.wait(20)
        return super().step(action)


def test_each_evaluation_is_a_point_of_the_curve(tmp_path: Path) -> None:
    """Also one of an older version, which another worker ends after one of a newer."""
    with loopback_collector(
        SlowInWorker2,
        ConstantPolicy(),
        frames_per_batch=5,
        num_workers=3,
        evaluation=dc.EvaluationWorkers(num_workers=2, num_episodes=1),
        monitor=dc.Monitor(run_dir=tmp_path, view=False, every_s=3600),
    ) as collector:
        collector.next()
        collector.update_policy_weights_(ConstantPolicy())
        eventually(lambda: (1, 1) in played(collector))
        SlowInWorker2.may_go_on.set()
        eventually(lambda: (0, 2) in played(collector))
    lines = map(json.loads, (tmp_path / "stats.jsonl").read_text().splitlines())
    points = [(line["evaluation"]["policy_version"], line["evaluation"]["count"]) for line in lines]
    assert (0, 2) in points
    assert points[-1][0] == 1


def played(collector: dc.RPCDataCollector) -> set[tuple[int, int]]:
    """Version and worker of each evaluation."""
    return {(int(e.policy_version[0]), int(e.worker_id[0])) for e in collector.evaluations}


def test_env_that_ends_its_worker() -> None:
    limits = dc.Faults(max_env_faults=1, max_restarts=0)
    collector = loopback_collector(StumblesFor(9), num_workers=2, frames_per_batch=4, faults=limits)
    with collector, pytest.raises(dc.EnvError, match="stumbled"):
        for _ in collector:
            pass
    stats = collector.stats()
    # The second ended the worker: no rollout tells of it.
    assert stats.num_env_faults == stats.workers[0].num_env_faults == 2
    assert [fault.worker_id for fault in stats.env_faults] == [0, 0]
    assert collector.ledger.workers[0].env_faults == 2


class SolvedBy(CountdownEnv):
    """Says in ``info`` whether an episode is solved: by worker 1, at the last frame."""

    def __init__(self, worker_id: int) -> None:
        self.worker_id = worker_id

    def reset(self, **kwargs: Any) -> Any:
        return super().reset(**kwargs)[0], {"solved": False}

    def step(self, action: Any) -> Any:
        *result, over, truncated, _ = super().step(action)
        return (*result, over, truncated, {"solved": over and self.worker_id == 1})


@pytest.mark.parametrize("sync", [True, False], ids=["sync", "async"])
def test_metrics_of_workers(sync: bool) -> None:
    collector = loopback_collector(
        lambda context: SolvedBy(context.worker_id),
        num_workers=2,
        sync=sync,
        frames_per_batch=20,
        info_keys=["solved"],
        monitor=dc.Monitor(metrics={"success": ("next", "solved")}, view=False),
    )
    with collector:
        stats = collector.stats()
        while not (stats.workers and all(w.num_episodes for w in stats.workers.values())):
            collector.next()
            stats = collector.stats()
        evaluated = collector.evaluate(4)
    assert sorted(evaluated.metrics["success"].tolist()) == [0.0, 0.0, 1.0, 1.0]
    assert [w.metrics for w in stats.workers.values()] == [{"success": 0.0}, {"success": 1.0}]
    share = stats.workers[1].num_episodes / stats.episodes.count
    assert stats.episodes.metrics == {"success": pytest.approx(share)}


def test_a_metric_that_workers_do_not_have() -> None:
    monitor = dc.Monitor(metrics={"success": ("next", "solved")}, view=False)
    with pytest.raises(dc.ArgumentError, match=r"\('next', 'solved'\)"):
        loopback_collector(CountdownEnv, num_workers=1, frames_per_batch=20, monitor=monitor)
