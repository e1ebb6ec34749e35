"""The report of a run: what it reads from the statistics, and what it shows."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from distcollect.commands import main as cli
from distcollect.commands.report.charts import duration
from distcollect.commands.report.history import Span, history_of, read
from distcollect.commands.report.page import page

BEGUN_AT = 1_700_000_000.0


def snapshot(elapsed_s: float, **given: Any) -> dict[str, Any]:
    """A line of ``stats.jsonl``, ``elapsed_s`` after the start."""
    worker = {"state": "ready", "frames": 10, "num_restarts": 0, "lost": {}}
    return {
        "time": BEGUN_AT + elapsed_s,
        "collector": "RPCDataCollector",
        "elapsed_s": elapsed_s,
        "frames_per_s": 5.0,
        "lag": {"frames": {}},
        "episodes": {"count": 0, "mean_return": None, "mean_length": None},
        "num_restarts": 0,
        "ended": False,
        "bottleneck": "Bound by <nothing> & nobody.",
        **given,
        "workers": {w: {**worker, **each} for w, each in given.get("workers", {"0": {}}).items()},
    }


def run_of_two() -> list[dict[str, Any]]:
    """Worker 1 is lost and replaced, worker 2 joins later, worker 0 leaves."""
    episodes = {"count": 7, "mean_return": 2.5, "mean_length": 20.0}
    return [
        snapshot(1, workers={"0": {}, "1": {}}, lag={"frames": {"0": 20}}),
        snapshot(
            2, workers={"0": {}, "1": {"state": "joining"}}, lag={"frames": {"0": 30, "2": 10}}
        ),
        snapshot(3, workers={"0": {"state": "left"}, "1": {"num_restarts": 1}, "2": {}}),
        snapshot(4, workers={"0": {"state": "left"}, "1": {"num_restarts": 2}, "2": {}}),
        snapshot(
            5,
            workers={
                "0": {"state": "left", "frames": 100},
                "1": {"state": "left", "frames": 50, "lost": {"worker_lost": 9, "stale": 0}},
                "2": {"state": "left", "frames": 30, "lost": {"shut_down": 4}},
            },
            lag={"frames": {"0": 30, "2": 50}},
            episodes=episodes,
            num_restarts=2,
            ended=True,
        ),
    ]


def test_what_happened_to_workers() -> None:
    history = history_of(run_of_two())
    assert history.changes == {"lost": 2, "left": 1, "joined": 3}
    assert history.spans == {
        0: [Span(0, 2, "ready"), Span(2, 5, "left")],
        1: [
            Span(0, 1, "ready"),
            *(Span(1, 1, "lost"), Span(1, 2, "joining"), Span(2, 3, "ready")),
            *(Span(3, 3, "lost"), Span(3, 5, "ready")),  # replaced between two snapshots
        ],
        2: [Span(2, 5, "ready")],
    }
    # Lags are of the frames in between.
    assert [(point["mean lag"], point["highest lag"]) for point in history.points] == [
        (0, 0),
        (1, 2),  # ten frames of lag 0, ten of lag 2
        (math.nan, math.nan),
        (math.nan, math.nan),
        (1.25, 2),
    ]
    assert history.lags == {0: 30, 2: 50}


def test_a_clock_that_is_set_back_turns_no_curve_back() -> None:
    told = [snapshot(1), snapshot(2, time=BEGUN_AT - 500), snapshot(3, time=BEGUN_AT - 499)]
    told += [snapshot(1, time=BEGUN_AT - 490, collector_id="another")]
    history = history_of(told)
    assert [point and point["t_s"] for point in history.points] == [1, 2, 3, None, 4]
    assert history.spans[0] == [Span(0, 4, "ready")]


def test_another_collector_writes_on() -> None:
    first = snapshot(9, lag={"frames": {"1": 4}})
    second = snapshot(2, time=BEGUN_AT + 30, lag={"frames": {"1": 3}})
    history = history_of([first, second])
    assert [point and point["t_s"] for point in history.points] == [9, None, 30]
    assert history.lags == {1: 7}
    assert history.delivered == {0: 20}
    assert history.elapsed_s == 11
    assert history.spans[0] == [Span(0, 9, "ready"), Span(28, 30, "ready")]


class Page(HTMLParser):
    """Checks that tags are closed in order, and records what would be loaded."""

    VOID = frozenset({"meta", "link", "img", "br"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.shown = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [value for name, value in attrs if name in ("src", "href") and value]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None: ...

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.shown += data


def page_of(folder: Path, *snapshots: dict[str, Any], rest: str = "") -> tuple[str, str, list[str]]:
    """The page that the command writes: its text, what it shows, and the cells of its tables."""
    lines = "".join(json.dumps(each) + "\n" for each in snapshots)
    (folder / "stats.jsonl").write_text(lines + rest)
    assert cli.main(["report", str(folder)]) == 0
    text = (folder / "report.html").read_text()
    page = Page(text)
    assert page.loads == []
    assert not re.search(r"<script|@import|url\(", text)
    return text, page.shown, re.findall(r"<t[dh]>(.*?)</t[dh]>", text)


def test_the_page(tmp_path: Path) -> None:
    text, shown, cells = page_of(tmp_path, *run_of_two(), rest='{"time": 1, "fra')
    assert "Bound by <nothing> & nobody." in shown
    assert "3 joined, 1 left, 2 lost" in shown
    assert "lost, from 3 s" in shown
    lag = cells.index("2")
    assert cells[lag : lag + 3] == ["2", "50", "62.5%"]
    assert cells[-4:] == ["all", "180", "4", "9"]
    ledger = cells.index("worker")
    heads = ["worker", "delivered", "lost: shut_down", "lost: worker_lost"]
    assert cells[ledger : ledger + 4] == heads
    assert cli.main(["report", str(tmp_path), "--out", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").read_text() == text


def test_what_vanished_with_a_host(tmp_path: Path) -> None:
    workers = {"0": {}, "1": {"may_be_lost": 40}}
    _, _, cells = page_of(tmp_path, snapshot(5, workers=workers))
    assert cells[cells.index("at most more") :: 3] == ["at most more", "0", "40", "40"]


def test_a_state_is_never_markup(tmp_path: Path) -> None:
    state = '"><script>alert(1)</script>'
    page_of(tmp_path, *(snapshot(t, workers={"0": {"state": state}}) for t in (1, 2)))


def test_env_faults(tmp_path: Path) -> None:
    faults = [
        {"worker_id": n, "host": "host-<a>", "time": BEGUN_AT + n, "message": f"env {n} & more"}
        for n in range(4)
    ]
    told = (num_env_faults(2, faults[:2]), num_env_faults(9, faults[1:]))
    text, shown, _ = page_of(tmp_path, *told)
    assert "5 earlier ones are not shown." in shown
    assert [shown.count(f"host-<a>env {n} & more") for n in range(4)] == [1] * 4
    assert re.findall(r"<b>(\d+)</b><span>env faults", text) == ["9"]


def num_env_faults(count: int, faults: list[Any]) -> dict[str, Any]:
    return snapshot(count, num_env_faults=count, env_faults=faults)


def test_of_a_run_that_has_hardly_begun(tmp_path: Path) -> None:
    _, shown, _ = page_of(tmp_path, snapshot(0, workers={}))
    assert "Not measured: Mean return of the last hundred episodes; Mean length" in shown


def test_a_long_run_is_thinned_out(tmp_path: Path) -> None:
    file = tmp_path / "stats.jsonl"
    states = ("joining", "ready")
    told = (snapshot(t, workers={"0": {"state": states[t % 2]}}) for t in range(3_000))
    file.write_text("".join(json.dumps(line) + "\n" for line in told))
    history = read(file)
    assert 300 <= len(history.points) <= 400
    text = page(history, "flapping")
    assert len(text) < 500_000
    assert "1,500 joined, 1,499 lost" in text


def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Besides those in ``test_error_messages.py``."""
    (tmp_path / "stats.jsonl").write_text(json.dumps(snapshot(1)) + "\n")
    assert cli.main(["report", str(tmp_path), "--out", str(tmp_path)]) == 2
    assert "(Is a directory): name another file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(5, "5 s"), (90, "1:30 min"), (5400, "1:30 h"), (47 * 3600, "47:00 h"), (302_400, "3.5 d")],
)
def test_the_axis_of_time_is_readable_for_any_run(seconds: float, told: str) -> None:
    assert duration(seconds) == told
