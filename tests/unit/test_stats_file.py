"""The file with a run's statistics: only whole lines are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from distcollect.results import Stats
from distcollect.telemetry.stats_file import JsonLines, newest, snapshots


def write(path: Path, *frames: int) -> None:
    lines = JsonLines(path, 1.0)
    for each in frames:
        lines.write(Stats(frames=each, elapsed_s=each))
    lines.close()


def frames(path: Path) -> list[int]:
    with path.open("rb") as lines:
        return [told["frames"] for told in snapshots(lines)]


@pytest.mark.parametrize(
    "rest", [b'{"time": 1, "fra', b"\0" * 300_000, b"\xff\xc3", b"17\n[]\nnull\n", b'{"time": 5}\n']
)
def test_what_is_no_snapshot_is_passed_over(tmp_path: Path, rest: bytes) -> None:
    path = tmp_path / "stats.jsonl"
    write(path, 1, 2)
    with path.open("ab") as file:
        file.write(rest)
    assert frames(path) == [1, 2]
    told = newest(path)
    assert told is not None
    assert told["frames"] == 2
    # The run resumes after an interruption, and loses no line.
    write(path, 3, 4)
    assert frames(path) == [1, 2, 3, 4]


def test_the_newest_of_none(tmp_path: Path) -> None:
    path = tmp_path / "stats.jsonl"
    for text in ("", "noise", "{}\n" * 50_000):
        path.write_text(text)
        assert newest(path) is None
