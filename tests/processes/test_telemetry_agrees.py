"""One real run in which a worker is killed: all its reports must agree."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import cloudpickle
import pytest
import torch
from helpers.envs import ProcessIdEnv
from helpers.marked import Marked
from helpers.policies import ConstantPolicy
from helpers.trace_checks import assert_answered, assert_named, assert_nested, load

import distcollect as dc
from distcollect.commands import main as cli
from distcollect.results import LedgerReport, Stats
from distcollect.telemetry.display import log_line
from distcollect.telemetry.exporters import scalars

EVERY_S = 0.2
HAS_TENSORBOARD = importlib.util.find_spec("tensorboard") is not None
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers can't import test modules


@dataclass
class Run:
    """A run that is over.

    Attributes:
        folder: the folder it wrote to.
        told: the statistics given to its callback, one for each line in the file.
        stats: the collector's own, after the run.
    """

    folder: Path
    told: list[Stats]
    stats: Stats
    ledger: LedgerReport
    bottleneck: str


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("run")
    mark, told, policy = Marked(), list[Stats](), ConstantPolicy()
    monitor = dc.Monitor(
        run_dir=folder,
        tensorboard=HAS_TENSORBOARD,
        callback=told.append,
        every_s=EVERY_S,
        metrics={"return": ("next", "reward")},
        view=False,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(*mark.variable)
        patch.setenv("DISTCOLLECT_ZYGOTE", "off")  # so that a lost worker is missing for a while
        try:
            with dc.MultiaSyncDataCollector(
                partial(ProcessIdEnv, length=10, reward=2.0),
                policy,
                frames_per_batch=50,
                num_workers=2,
                monitor=monitor,
                trace=folder / "trace.json",
            ) as collector:
                killed = None
                while killed is None or not _was_told_of_both(told, killed):
                    batch = collector.next(timeout_s=60)
                    loss = torch.tensor([[collector.frames / 8]], requires_grad=True)
                    collector.log({"train/loss": loss, "count": 7, "diverged": math.nan})
                    collector.update_policy_weights_(policy)
                    of_one = int(batch["collector", "worker_id"][0]) == 1
                    if killed is None and of_one and len(told) > 3:
                        killed = len(told)
                        os.kill(int(batch["observation"][0, 0]), signal.SIGKILL)
            yield Run(
                folder, told, collector.stats(), collector.ledger, str(collector.bottleneck())
            )
        finally:
            mark.kill()


def _was_told_of_both(told: list[Stats], since: int) -> bool:
    """Whether worker 1 was lost, and its next process has delivered."""
    workers = [stats.workers[1] for stats in told[since:]]
    begun = next((w.frames for w in workers if w.state == "ready" and w.num_restarts), None)
    lost = any(worker.state != "ready" for worker in workers)
    return lost and begun is not None and workers[-1].frames > begun


def test_the_last_line_is_the_collectors_own_account(run: Run) -> None:
    lines = [json.loads(line) for line in (run.folder / "stats.jsonl").read_text().splitlines()]
    assert len(lines) > 5
    # Not the objects: they hold NaN, and from Python 3.13 on equal dataclasses must not.
    assert repr(Stats.from_dict(lines[-1])) == repr(run.told[-1]) == repr(run.stats)
    assert lines[-1]["bottleneck"] == run.bottleneck
    assert [line["ended"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert len({line["collector_id"] for line in lines}) == 1
    # No counter decreases, whatever happens to workers.
    for count in ("elapsed_s", "frames", "delivered", "policy_version", "num_restarts"):
        counts = [line[count] for line in lines]
        assert counts == sorted(counts)
    total = run.ledger.total
    assert total.open == 0
    logged = {"train/loss": run.stats.frames / 8, "count": 7, "diverged": math.nan}
    assert repr(run.stats.logged) == repr(logged)
    assert total.delivered == run.stats.delivered == sum(run.stats.lag.frames.values())
    assert total.lost == run.stats.lost
    assert run.stats.num_restarts == 1
    for worker_id, worker in run.stats.workers.items():
        frames = run.ledger.workers[worker_id]
        assert (worker.frames, worker.lost) == (frames.delivered, frames.lost)


def test_top_says_the_same(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    for where in (run.folder, run.folder / "stats.jsonl"):
        assert cli.main(["top", str(where), "--once"]) == 0
        said = capsys.readouterr().out
        assert said == f"{log_line(run.stats)}\n{run.bottleneck}\n"
        assert f", logged: train/loss {run.stats.frames / 8:,.4g}, count 7, diverged nan" in said
    assert cli.main(["report", str(run.folder)]) == 0
    page = (run.folder / "report.html").read_text()
    for name in ("train/loss", "count"):
        assert page.index(f"<h2>{name}: Logged") < page.index(f"<title>{name}: ")


def test_the_trace_has_each_process_of_the_run(run: Run) -> None:
    events = load(run.folder / "trace.json")
    processes = ["worker 0", "worker 1", "worker 1, incarnation 1"]
    assert_named(events, {"trainer", *processes})
    assert_nested(events)
    assert_answered(events, "worker 0")


@pytest.mark.skipif(not HAS_TENSORBOARD, reason="needs tensorboard (extra tensorboard)")
def test_tensorboard_reads_it(run: Run) -> None:
    from tensorboard.backend.event_processing import event_accumulator  # noqa: PLC0415

    everything = {event_accumulator.SCALARS: 0}
    events = event_accumulator.EventAccumulator(str(run.folder), size_guidance=everything)
    events.Reload()
    tags = set(events.Tags()["scalars"])
    groups = {"collector", "trainer_share", "worker_share", "metrics", "train", "count", "diverged"}
    assert {tag.partition("/")[0] for tag in tags} == groups
    assert events.Scalars("metrics/return")[-1].value == 2.0
    # Each call of log() is there, though several lie between two snapshots.
    losses = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert losses == [(step, step / 8) for step in range(50, run.stats.frames + 1, 50)]
    assert tags >= {"collector/frames_per_s", "collector/episode_return", "worker_share/env"}
    # One point per line, by frames, up to the last.
    told = {stats.frames: stats for stats in run.told}
    rates = events.Scalars("collector/frames_per_s")
    assert abs(len(rates) - len(run.told)) <= 1
    steps = [event.step for event in rates]
    assert steps == sorted(steps)
    assert steps[-1] == run.stats.frames
    assert len(told.keys() & set(steps)) > 3
    for tag, value in scalars(run.stats).items():
        assert events.Scalars(tag)[-1].value == pytest.approx(value, rel=1e-6)
    assert [event.value for event in events.Scalars("collector/workers")][-1] == 2
    assert min(event.value for event in events.Scalars("collector/workers")) == 1
