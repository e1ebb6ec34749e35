"""What the display shows, and what ``distcollect top`` reads."""

from __future__ import annotations

import io
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.stats_files import STATS, WORKER, write
from rich.console import Console

from distcollect.commands.main import main
from distcollect.commands.top import read_newest
from distcollect.results import EnvFault, Stats
from distcollect.telemetry.display import (
    Display,
    NotebookDisplay,
    is_terminal,
    log_line,
    rendered,
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
        "lost: worker_lost 12, 1 restart, 0 rollouts ready",
        "Bound by the envs",
    ):
        assert part in text
    assert re.search(r"^1 +joining +50 +0 +80% +0% +20% +1 +0$", text, re.MULTILINE)
    rest = (
        "trainer waits 75% of the time, workers wait 20%, lost: worker_lost 12, at most 9 more, "
        "1 restart"
    )
    assert log_line(replace(STATS, may_be_lost=9)).endswith(rest)
    assert "workers wait" not in log_line(replace(STATS, in_process=True))
    assert "(0%), years to go" in log_line(replace(STATS, total_frames=sys.maxsize))


FAULTS = tuple(
    EnvFault(worker_id, 0, "host-a", 1_700_000_000.0 + worker_id, f"env 1: step() {text}")
    for worker_id, text in enumerate(["raised [bold]\nOSError", "\x1b[2Jraised"])
)


def test_env_faults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stats = replace(STATS, num_env_faults=5, env_faults=FAULTS)
    assert log_line(stats).endswith(", 1 restart, 5 env faults")
    text = drawn(stats)
    assert re.search(r"5 env faults, the last: 20.* worker 1 on host-a: env 1: step\(\)", text)
    assert "\x1b[2J" not in text
    write(tmp_path, stats)
    assert main(["top", str(tmp_path), "--once"]) == 0
    *_, first, second = capsys.readouterr().out.splitlines()
    assert first.endswith("worker 0 on host-a: env 1: step() raised [bold] OSError")
    assert second.endswith("worker 1 on host-a: env 1: step() ?[2Jraised")
    alike = [EnvFault(3, 0, "host-a", 0.0, f"env {row}: reset() raised") for row in range(9)]
    write(tmp_path, replace(stats, env_faults=(*FAULTS, *alike)))
    assert main(["top", str(tmp_path), "--once"]) == 0
    *_, second, last = capsys.readouterr().out.splitlines()
    assert second.startswith("env fault: ")
    assert last.startswith("env fault, the last of 9 alike: ")
    assert last.endswith("worker 3 on host-a: env 8: reset() raised")


def test_it_fits_the_terminal() -> None:
    many = replace(STATS, workers=dict.fromkeys(range(500), WORKER))
    text = drawn(replace(many, num_env_faults=5, env_faults=FAULTS), width=60, height=24)
    assert len(text.splitlines()) <= 24
    assert "and 490 more ready" in text
    # Workers with a problem are listed.
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


def test_in_a_notebook_too(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    def display(bundle: dict[str, str], **_: Any) -> Any:
        shown.append(bundle["text/plain"])
        return SimpleNamespace(update=display)

    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    tqdm = pytest.importorskip("tqdm")
    pytest.importorskip("tqdm.notebook")
    assert tqdm.notebook.tqdm._instances is tqdm.tqdm._instances
    for begins_before in (True, False):
        notebook = NotebookDisplay()
        if begins_before:
            notebook.write(STATS)
            assert "Bound by the envs" in shown[-1]
        with tqdm.tqdm(file=io.StringIO()):
            notebook.write(STATS)
            notebook.write(STATS)
        notebook.write(STATS)
        assert shown[1:] == [""]  # it vanished
    notebook.close()


def test_top_reads_the_last_whole_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, *[replace(STATS, frames=n) for n in range(500)], rest='{"frames": 7, "col')
    assert read_newest(tmp_path)[0].frames == 499
    assert main(["top", str(tmp_path), "--once"]) == 0
    said = capsys.readouterr().out
    assert "499 of 4,000 frames" in said
    assert "s ago" in said
    assert "Bound by the envs" in said
    write(tmp_path, replace(STATS, workers=dict.fromkeys(range(3000), WORKER)))
    assert len(read_newest(tmp_path)[0].workers) == 3000


def test_there_is_no_display_where_the_user_types(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = SimpleNamespace(isatty=lambda: True)
    assert is_terminal(terminal)
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert not is_terminal(terminal)
