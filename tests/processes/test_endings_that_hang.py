"""A launch ends though objects of the user's hang when they are destroyed."""

from __future__ import annotations

import sys

import pytest
from helpers.launching import finish, slurm_variables, start
from helpers.marked import Marked
from helpers.paths import SCRIPTS

SCRIPT = SCRIPTS / "leave_something.py"


def launch(what: str, num_ranks: int) -> list:
    started = []
    for rank in range(num_ranks):
        variables = slurm_variables(rank, 1, num_ranks)
        # Otherwise the worker's rank would leave the same global variable.
        does = what if rank == 0 or what == "group" else "nothing"
        limit = {"DISTCOLLECT_EXIT_TIMEOUT_S": "100" if does in {"group", "nothing"} else "3"}
        started.append(start([sys.executable, SCRIPT, does], **variables, **limit))
    return started


@pytest.mark.parametrize(
    ("what", "code", "culprit"),
    [
        ("variable", 0, "variable 'hangs' of main(), of type Hangs,"),
        ("exit", 3, "variable 'hangs' of main(), of type Hangs,"),
        ("global", 0, "an object that the script left behind"),
    ],
)
def test_a_destructor_that_holds_the_lock(
    marked: Marked, what: str, code: int, culprit: str
) -> None:
    trainer, worker = launch(what, 2)
    output, _ = trainer.communicate(timeout=100)
    assert trainer.returncode == code, output
    assert f"{culprit} did not end within 3 s" in output
    assert f"ended with exit code {code}" in output
    assert "in __del__" in output  # where it hangs
    if what == "variable":
        assert "main ends with" in output
    finish([worker], 100)
    assert marked.gone(), marked.left()


def test_a_process_group_whose_threads_want_the_lock() -> None:
    """Nothing hangs: the group is not destroyed while the lock is held."""
    for output in finish(launch("group", 4), 110)[:2]:
        assert "gathered [6, 6]" in output
        assert "did not end" not in output
