"""One real run in which a worker is killed: all its reports must agree."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from helpers.envs import ProcessIdEnv
from helpers.marked import Marked
from helpers.policies import ConstantPolicy
from helpers.trace_checks import assert_answered, assert_named, assert_nested, load

import distcollect as dc
from distcollect.commands import main as cli
from distcollect.commands.report.charts import duration, short
from distcollect.results import LedgerReport, Stats
from distcollect.telemetry.display import log_line
from distcollect.telemetry.prometheus import figures

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
    assert total.delivered == run.stats.delivered == sum(run.stats.lag.frames.values())
    assert total.lost == run.stats.lost
    assert run.stats.num_restarts == 1
    for worker_id, worker in run.stats.workers.items():
        frames = run.ledger.workers[worker_id]
        assert (worker.frames, worker.lost) == (frames.delivered, frames.lost)


class Page(HTMLParser):
    """The parts of a report's page.

        Attributes:
    texts: all texts, by the class of the element ("" for none).
    titles: tooltips, by the heading above.
    rows: the rows of the table.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.texts: list[tuple[str, str]] = []
        self.titles: dict[str, list[str]] = {}
        self.rows: list[list[str]] = []
        self._open: list[tuple[str, str]] = []
        self._heading = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "meta":
            self._open.append((tag, dict(attrs).get("class") or ""))
        if tag == "tr":
            self.rows.append([])

    def handle_startendtag(self, tag: str, attrs: Any) -> None: ...

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        if not data.strip():
            return
        tag, style = self._open[-1]
        self.texts.append((style, data))
        if tag == "h2":
            self._heading = data
        elif tag == "title" and self._heading:
            self.titles.setdefault(self._heading, []).append(data)
        elif tag in ("td", "th"):
            self.rows[-1].append(data)

    def points(self, heading: str) -> list[tuple[str, str]]:
        """The points of a curve as (value, time)."""
        found = (re.fullmatch(r".*: (.*) after (.*)", title) for title in self.titles[heading])
        return [(match[1], match[2]) for match in found if match]


@pytest.fixture(scope="module")
def page(run: Run) -> Page:
    assert cli.main(["report", str(run.folder)]) == 0
    return Page((run.folder / "report.html").read_text())


def test_the_reports_curves(run: Run, page: Page) -> None:
    lines = [json.loads(line) for line in (run.folder / "stats.jsonl").read_text().splitlines()]
    whens = [duration(line["elapsed_s"]) for line in lines]
    assert len(lines) <= 400  # otherwise several lines make one point
    rates = [short(line["frames_per_s"]) for line in lines]
    assert page.points("Frames per second") == list(zip(rates, whens, strict=True))
    for heading, value in (
        ("Episode return, mean of the last hundred", "20"),
        ("Episode length in frames, mean of the last hundred", "10"),
    ):
        known = [when for line, when in zip(lines, whens, strict=True) if line["episodes"]["count"]]
        assert page.points(heading) == [(value, when) for when in known]
    highest = [title for title in page.titles[LAGS] if title.startswith("highest")]
    assert max(float(title.split()[2]) for title in highest) == run.stats.lag.max


LAGS = "Lag of the delivered frames, in versions"


def test_the_report_has_the_loss_and_the_join(run: Run, page: Page) -> None:
    told = page.titles["Workers: joins and losses"]
    events = [title.partition(", ")[0] for title in told if ", seen at " in title]
    assert events == ["worker 1 lost", "worker 1 joined"]
    assert any(text == "1 joined, 1 lost" for _, text in page.texts)
    spans = [title.partition(", ")[0] for title in told if ", from " in title]
    # Ordered by worker, then by time; all workers leave at the end.
    assert [s for s in spans if s not in ("joining", "left")] in (
        ["ready", "ready", "lost", "ready"],
        ["ready", "ready", "ready"],
    )
    assert spans.count("left") == 2


def test_the_reports_totals(run: Run, page: Page) -> None:
    head, *rows = page.rows
    causes = sorted(run.ledger.total.lost)
    assert head == ["worker", "delivered", *(f"lost: {cause}" for cause in causes)]
    parties = {**{str(w): f for w, f in run.ledger.workers.items()}, "all": run.ledger.total}
    assert rows == [
        [name, f"{f.delivered:,}", *(f"{f.lost.get(cause, 0):,}" for cause in causes)]
        for name, f in parties.items()
    ]
    assert ("bottleneck", run.bottleneck) in page.texts
    histogram = Counter[int]()
    for title in page.titles["How old the policy of delivered frames was"]:
        lag, frames = re.match(r"lag (\d+): ([\d,]+) frames", title).groups()  # type: ignore[union-attr]
        histogram[int(lag)] = int(frames.replace(",", ""))
    assert {lag: n for lag, n in histogram.items() if n} == run.stats.lag.frames
    texts = [text for _, text in page.texts]
    tiles = {name: texts[i - 1] for i, name in enumerate(texts)}
    assert tiles["frames delivered"] == short(run.stats.delivered)
    assert tiles["frames lost"] == short(sum(run.stats.lost.values()))
    assert tiles["episodes"] == short(run.stats.episodes.count)
    assert tiles["processes replaced"] == "1"
    assert not any("not ended" in text for text in texts)


def test_top_says_the_same(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    for where in (run.folder, run.folder / "stats.jsonl"):
        assert cli.main(["top", str(where), "--once"]) == 0
        assert capsys.readouterr().out == f"{log_line(run.stats)}\n{run.bottleneck}\n"


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
    assert {tag.partition("/")[0] for tag in tags} == {
        "collector",
        "trainer_share",
        "worker_share",
    }
    assert tags >= {"collector/frames_per_s", "collector/episode_return", "worker_share/env"}
    # One point per line, by frames, up to the last.
    told = {stats.frames: stats for stats in run.told}
    rates = events.Scalars("collector/frames_per_s")
    assert abs(len(rates) - len(run.told)) <= 1
    steps = [event.step for event in rates]
    assert steps == sorted(steps)
    assert steps[-1] == run.stats.frames
    assert len(told.keys() & set(steps)) > 3
    for name, value in figures(run.stats).items():
        group, share, part = name.partition("_share_")
        tag = f"{group}_share/{part}" if share else f"collector/{name}"
        assert events.Scalars(tag)[-1].value == pytest.approx(value, rel=1e-6)
    assert [event.value for event in events.Scalars("collector/workers")][-1] == 2
    assert min(event.value for event in events.Scalars("collector/workers")) == 1
