"""Children that the trainer forks leave its workers alone."""

from __future__ import annotations

import subprocess
import sys

from helpers.marked import Marked
from helpers.paths import SCRIPTS


def test_forked_children_leave_in_every_way(marked: Marked) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPTS / "fork_children.py"],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.stdout.splitlines() == [
        "exit 5",
        "raise 1",
        "use 7",
        "shutdown 0",
        "signal -15",
        "same worker True",
    ], done.stderr
    assert done.returncode == 0
    assert marked.gone(), marked.left()
