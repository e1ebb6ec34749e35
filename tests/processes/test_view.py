"""What is shown of a run: the display on a terminal, and ``distcollect top``."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.paths import SCRIPTS
from rich.console import Console

import distcollect as dc
from distcollect.commands.main import main
from distcollect.commands.top import news_of
from distcollect.results import EpisodeStats, Lags, Stats, TrainerTimes, WorkerStats, WorkerTimes
from distcollect.telemetry.display import Display, rendered

SCRIPT = SCRIPTS / "shown.py"
WORKER = WorkerStats(frames=250, frames_per_s=50.0, times=WorkerTimes(env=0.8, wait=0.2))
STATS = Stats(
    collector="RPCDataCollector",
    elapsed_s=10.0,
    frames=1000,
    total_frames=4000,
    delivered=1000,
    frames_per_s=200.0,
    mean_frames_per_s=100.0,
    lag=Lags({0: 500, 1: 500}),
    episodes=EpisodeStats(7, 21.5, 20.0, 9.0, 30.0),
    trainer=TrainerTimes(train=0.25, collect=0.75),
    times=WorkerTimes(env=0.8, wait=0.2),
    lost={"worker_lost": 12},
    num_restarts=1,
    workers={0: WORKER, 1: replace(WORKER, state="joining", num_restarts=1)},
)


def drawn(stats: Stats, *, width: int = 110, height: int = 40) -> str:
    console = Console(file=io.StringIO(), width=width, height=height)
    console.print(rendered(stats, height))
    return console.file.getvalue()


def test_what_the_display_has() -> None:
    text = drawn(STATS)
    for part in (
        "1,000 of 4,000 frames (25%), 0:00:15 to go, 200 frames/s now, 100 on average",
        "7 episodes, return 21.5 (9 to 30), length 20, lag 0.5 (at most 1)",
        "trainer: train 25%, collect 75%",
        "lost: worker_lost 12, 1 restarts",
        "Bound by the envs",
    ):
        assert part in text
    assert re.search(r"^1 +joining +50 +0 +80% +0% +20% +1 +0$", text, re.MULTILINE)


def test_it_fits_the_terminal() -> None:
    many = replace(STATS, workers=dict.fromkeys(range(500), WORKER))
    text = drawn(many, width=60, height=24)
    assert len(text.splitlines()) <= 24
    assert "and 489 more ready" in text
    # Those that something is the matter with are there.
    many = replace(many, workers={**many.workers, 321: replace(WORKER, state="lost")})
    text = drawn(many, width=60, height=24)
    assert re.search(r"^9 .*\n321 +lost .*\nand 489 more ready$", text, re.MULTILINE)


def test_the_display_begins_late_and_gives_way_to_a_progress_bar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = io.StringIO()
    display = Display(Console(file=file, force_terminal=True, width=110))
    try:
        display.write(replace(STATS, elapsed_s=0.5))
        assert not file.getvalue()
        display.write(STATS)
        assert "Bound by the envs" in file.getvalue()
        bars = SimpleNamespace(tqdm=SimpleNamespace(_instances={object()}))
        monkeypatch.setitem(sys.modules, "tqdm", bars)
        display.write(STATS)
        length = len(file.getvalue())
        display.write(STATS)
        assert len(file.getvalue()) == length
    finally:
        display.close()


def on_terminal(*args: str, **env: str) -> tuple[str, int]:
    """What a script shows on a terminal, and how it ends."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, *args],
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "40", **env},
        start_new_session=True,
    )
    os.close(theirs)
    shown = b""
    try:
        while data := os.read(ours, 65536):
            shown += data
    except OSError:
        pass  # that is how a terminal says that nobody holds it any more
    finally:
        os.close(ours)
        process.kill()
    return shown.decode(), process.wait(10)


@pytest.mark.parametrize(
    ("ending", "says"),
    [("shut_down", ""), ("raises", "RuntimeError: of the user's own"), ("interrupted", "Keyboard")],
)
def test_on_a_terminal(ending: str, says: str) -> None:
    shown, status = on_terminal(str(SCRIPT), ending)
    assert (status == 0) == (not says)
    assert says in shown
    assert shown.count("SyncDataCollector: ") >= 2
    # Every line that was printed is there, on a line of its own.
    lines = re.split(r"[\r\n]+|\x1b\[[0-9;]*[A-Z]", shown)
    printed = [line for line in lines if line.startswith("batch ")]
    assert printed == [f"batch {5 * n} is here" for n in range(len(printed))]
    assert len(printed) > 3
    # The cursor is there in the end.
    assert shown.rfind("\x1b[?25h") > shown.rfind("\x1b[?25l")


def test_nothing_is_shown_where_that_is_not_wanted() -> None:
    shown, status = on_terminal(str(SCRIPT), "shut_down", DISTCOLLECT_VIEW="0")
    assert status == 0
    assert "\x1b" not in shown
    assert set(re.sub(r"\d+", "", shown).split()) == {"batch", "is", "here"}


def write(folder: Path, *stats: Stats, rest: str = "") -> None:
    lines = [json.dumps({"time": time.time(), **each.as_dict()}) for each in stats]
    (folder / "stats.jsonl").write_text("".join(f"{line}\n" for line in lines) + rest)


def test_top_reads_the_last_whole_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, *[replace(STATS, frames=n) for n in range(500)], rest='{"frames": 7, "col')
    assert news_of(tmp_path).stats.frames == 499
    assert main(["top", str(tmp_path), "--once"]) == 0
    said = capsys.readouterr().out
    assert "499 of 4,000 frames" in said
    assert "s ago" in said
    assert "Bound by the envs" in said
    write(tmp_path, replace(STATS, workers=dict.fromkeys(range(3000), WORKER)))
    assert len(news_of(tmp_path).stats.workers) == 3000


def test_top_of_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", str(tmp_path)]) == 2
    assert "Monitor(run_dir=...)" in capsys.readouterr().err
    write(tmp_path)
    with pytest.raises(dc.ArgumentError, match="only just begun"):
        news_of(tmp_path)


def test_top_on_a_terminal_ends_with_the_run(tmp_path: Path) -> None:
    write(tmp_path, replace(STATS, ended=True))
    shown, status = on_terminal("-m", "distcollect", "top", str(tmp_path))
    assert status == 0
    assert "1,000 of 4,000 frames (25%)" in shown
