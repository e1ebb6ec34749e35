"""Reports about a running run: no error in them can end the run or delay it."""

from __future__ import annotations

import io
import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import distcollect as dc
from distcollect.results import EpisodeStats, Stats, WorkerStats
from distcollect.telemetry import monitor
from distcollect.telemetry.display import Display, is_terminal
from distcollect.telemetry.monitor import MonitorThread
from distcollect.telemetry.stats_file import JsonLines

STATS = Stats(collector="X", elapsed_s=5.0, frames=10, delivered=10)


def test_a_trace_may_be_in_the_run_dir(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "today"
    MonitorThread(dc.Monitor(view=False, run_dir=folder), folder / "trace.json").close(None)
    assert (folder / "trace.json").is_file()


def watching(latest: Stats | None = STATS, **options: Any) -> MonitorThread:
    watch = MonitorThread(dc.Monitor(view=False, **options))
    watch.begin(lambda: latest)
    return watch


def lines(file: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in file.read_text().splitlines()]


def test_a_full_disk_is_told_of_once_and_ends_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "stats.jsonl").symlink_to("/dev/full")
    told: list[Stats] = []
    enough = threading.Event()

    def tell(stats: Stats) -> None:
        told.append(stats)
        if len(told) > 5:
            enough.set()

    watch = watching(run_dir=tmp_path, callback=tell, every_s=0.005)
    assert enough.wait(20)
    watch.close(STATS)
    assert told[-1].ended
    (record,) = [each for each in caplog.records if each.levelname == "ERROR"]
    assert f"{tmp_path}/stats.jsonl failed" in record.getMessage()
    assert "No space left" in str(record.exc_info)


@pytest.mark.parametrize("ending", ["shuts it down", "exits"])
def test_a_callback_that_ends(
    ending: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It ends itself only, and what is written has the end once, as its last line."""
    told: list[Stats] = []
    threads: list[threading.Thread] = []
    has_ended = threading.Event()

    def tell(stats: Stats) -> None:
        told.append(stats)
        threads.append(threading.current_thread())
        has_ended.set()
        if not stats.ended:
            if ending == "shuts it down":
                watch.close(STATS)
            sys.exit(1)

    watch = MonitorThread(dc.Monitor(view=False, run_dir=tmp_path, callback=tell, every_s=0.001))
    watch.begin(lambda: STATS)
    assert has_ended.wait(20)
    watch.close(STATS)
    threads[0].join(20)
    ended = [line["ended"] for line in lines(tmp_path / "stats.jsonl")]
    assert ended == [False] * (len(ended) - 1) + [True]
    assert [stats.ended for stats in told] == [False, True][: 1 + (ending == "shuts it down")]
    assert caplog.text.count("Monitor(callback=...) failed") == 1


def test_a_callback_that_hangs_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(monitor, "_JOIN_TIMEOUT_S", 0.05)
    begun, goes_on = threading.Event(), threading.Event()

    def tell(stats: Stats) -> None:
        begun.set()
        goes_on.wait(30)

    watch = watching(callback=tell, every_s=0.001)
    assert begun.wait(20)
    watch.close(STATS)
    assert "hangs for 0.05 s: Monitor(callback=...)" in caplog.text
    goes_on.set()


def test_lines_are_json_whatever_envs_give(tmp_path: Path) -> None:
    inf, nan = float("inf"), float("nan")
    file = JsonLines(tmp_path / "stats.jsonl", 5.0)
    file.write(Stats(episodes=EpisodeStats(2, nan, 3.0, -inf, inf)))
    file.close()
    (line,) = lines(tmp_path / "stats.jsonl")
    assert line["episodes"]["mean_return"] is line["episodes"]["max_return"] is None


def test_collectors_that_write_at_once_write_to_files_of_their_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "stats.jsonl"
    first, second = JsonLines(path, 5.0), JsonLines(path, 5.0)
    assert "this one writes to" in caplog.text
    for _ in range(2):
        first.write(STATS)
        second.write(STATS)
    first.close()
    third = JsonLines(path, 5.0)
    third.write(STATS)
    second.close()
    third.close()
    ids = [line["collector_id"] for line in lines(path)]
    assert ids[0] == ids[1] != ids[2]
    assert [line["collector_id"] for line in lines(tmp_path / "stats-2.jsonl")].count(ids[0]) == 0


def test_lines_about_many_workers_come_less_often(tmp_path: Path) -> None:
    file = JsonLines(tmp_path / "stats.jsonl", 5.0)
    file.write(Stats(workers=dict.fromkeys(range(16), WorkerStats())))
    assert file.every_s == 5.0
    file.write(Stats(workers=dict.fromkeys(range(2000), WorkerStats())))
    size = len((tmp_path / "stats.jsonl").read_text().splitlines()[1])
    assert size / file.every_s == pytest.approx(65536 / 5, rel=0.01)
    file.close()


class Gone(io.StringIO):
    """A terminal that is closed during the run."""

    gone = False

    def write(self, text: str) -> int:
        if self.gone:
            raise OSError(5, "Input/output error")
        return super().write(text)


def test_a_terminal_that_goes_away_leaves_room_for_another() -> None:
    file = Gone()
    display = Display(Console(file=file, force_terminal=True))
    display.write(STATS)
    file.gone = True
    with pytest.raises(OSError, match="Input/output"):
        display.close()
    file = Gone()
    another = Display(Console(file=file, force_terminal=True))
    another.write(STATS)
    another.close()
    assert "10 frames" in file.getvalue()


def test_what_is_no_terminal() -> None:
    closed = io.StringIO()
    closed.close()
    for stream in (None, object(), closed, io.StringIO()):
        assert not is_terminal(stream)
