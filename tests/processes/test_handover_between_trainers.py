"""Rollouts that one trainer process hands over to another."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys

from helpers.paths import SCRIPTS

SCRIPT = SCRIPTS / "hand_over.py"


def test_between_two_trainers() -> None:
    """Also if the worker is killed before the second trainer has taken its rollout.

    Over RPC; ``test_without_rpc.py`` runs this over TCP.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    with subprocess.Popen(
        [*command, str(SCRIPT)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as launch:
        try:
            output, _ = launch.communicate(timeout=120)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(launch.pid, signal.SIGKILL)
    assert launch.returncode == 0, output
    [line] = [line for line in output.splitlines() if line.startswith('{"handed_over"')]
    seen = json.loads(line)
    assert seen["handed_over"] == seen["taken"], output
    assert "Exception raised from" not in output, output
