"""The display and ``distcollect top`` on a terminal."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.paths import SCRIPTS
from helpers.stats_files import STATS, write

SCRIPT = SCRIPTS / "show_display.py"


TERMINAL = {
    "TERM": "xterm",
    "COLUMNS": "120",
    "LINES": "40",
    "PYTHON_COLORS": "0",
    "PYTHONUNBUFFERED": "",  # else a print is several writes, which mix with those of others
}


def on_terminal(*args: str, **env: str) -> tuple[str, int]:
    """Run the script on a terminal; return what it shows, and its exit code."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, *args],
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, **TERMINAL, **env},
        start_new_session=True,
    )
    os.close(theirs)
    shown = b""
    try:
        while data := os.read(ours, 65536):
            shown += data
    except OSError:
        pass  # a terminal gives this error when no process has it open
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
    # Each printed text has its own line.
    lines = re.split(r"[\r\n]+|\x1b\[[?0-9;]*[A-Za-z]", shown)
    printed = [line for line in lines if line.startswith("batch ")]
    assert printed == [f"batch {5 * n} is here" for n in range(len(printed))]
    assert len(printed) > 3
    # The cursor is visible at the end.
    assert shown.rfind("\x1b[?25h") > shown.rfind("\x1b[?25l")


@pytest.mark.parametrize("zygote", ["keep", pytest.param("off", marks=pytest.mark.slow)])
def test_what_workers_print_is_above_the_display(zygote: str) -> None:
    script = str(SCRIPTS / "printing_workers.py")
    shown, status = on_terminal(script, "5", DISTCOLLECT_ZYGOTE=zygote)
    assert status == 0, shown
    assert shown.count("MultiaSyncDataCollector: ") >= 2
    assert "\x1b[32mC 5" in shown  # colors stay
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    lines = [line.strip() for line in re.split(r"[\r\n]+|\x1b\[[?0-9;]*[A-Za-z]", plain)]
    kinds = "out {} x", "err {}", "C {}"
    printed = [line for line in lines if re.match(r"worker 0: (out|err|C) \d", line)]
    assert len(printed) > 300
    numbers = [int(line.split()[3]) for line in printed]
    # Each in whole, once, in the order in which they were printed, and none is lost.
    assert numbers == list(range(len(numbers)))
    for number, line in enumerate(printed):
        if number != 3:
            assert line == "worker 0: " + kinds[number % 3].format(number)
    assert shown.count("x" * 50) >= 3  # the long one
    assert lines.count("worker 1: unfinished last words") == 1
    batches = [line for line in lines if line.startswith("batch ")]
    assert batches == [f"batch {5 * n} is here" for n in range(len(batches))]


def test_without_a_display_workers_print_to_the_terminal() -> None:
    script = str(SCRIPTS / "printing_workers.py")
    shown, _ = on_terminal(script, "1", DISTCOLLECT_VIEW="0")
    assert re.search(r"^out 6 x\r$", shown, re.MULTILINE)
    assert "worker 0: " not in shown


def test_nothing_is_shown_where_that_is_not_wanted() -> None:
    shown, status = on_terminal(str(SCRIPT), "shut_down", DISTCOLLECT_VIEW="0")
    assert status == 0
    assert "\x1b" not in shown
    assert set(re.sub(r"\d+", "", shown).split()) == {"batch", "is", "here"}


def test_top_on_a_terminal_ends_with_the_run(tmp_path: Path) -> None:
    write(tmp_path, replace(STATS, ended=True))
    shown, status = on_terminal("-m", "distcollect", "top", str(tmp_path))
    assert status == 0
    assert "1,000 of 4,000 frames (25%)" in shown
