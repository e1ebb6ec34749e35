"""How the exit code of a process reads."""

from __future__ import annotations

import pytest

from distcollect.launch.local_processes import describe_exit


@pytest.mark.parametrize(
    ("code", "text"),
    [(0, "exit code 0"), (3, "exit code 3"), (-9, "killed by SIGKILL"), (-99, "by signal 99")],
)
def test_describe_exit(code: int, text: str) -> None:
    assert text in describe_exit(code)
