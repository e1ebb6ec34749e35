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


TERMINAL = {"TERM": "xterm", "COLUMNS": "120", "LINES": "40", "PYTHON_COLORS": "0"}


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
