"""A broadcast that was given up, and is still under way when the process ends."""

from __future__ import annotations

import subprocess
import sys

from helpers.paths import SCRIPTS


def test_its_failure_does_not_abort_the_process() -> None:
    command = [sys.executable, SCRIPTS / "exit_during_broadcast.py"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert "was given up" in ended.stdout
    assert ended.returncode == 0, ended.stderr
