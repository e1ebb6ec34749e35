"""A broadcast that was given up, and is still under way when the process ends."""

from __future__ import annotations

import subprocess
import sys

import pytest
from helpers.paths import SCRIPTS


@pytest.mark.parametrize("script", ["exit_during_broadcast.py", "exit_in_a_call_of_torch.py"])
def test_it_does_not_abort_the_process(script: str) -> None:
    command = [sys.executable, SCRIPTS / script]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert "was given up" in ended.stdout
    assert ended.returncode == 0, ended.stderr
