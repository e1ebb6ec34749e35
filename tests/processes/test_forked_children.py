"""Children that the trainer forks leave its workers alone."""

from __future__ import annotations

from helpers.marked import Marked
from helpers.paths import SCRIPTS
from helpers.programs import run_python


def test_forked_children_leave_in_every_way(marked: Marked) -> None:
    done = run_python(SCRIPTS / "fork_children.py", timeout_s=110)
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
