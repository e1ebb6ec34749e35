"""A trace whose process was killed; for those of several processes see test_telemetry_agrees.py."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from helpers.marked import Marked
from helpers.trace_checks import assert_nested, spans

from distcollect.telemetry.trace import STEPS

_KILLED = """
import sys, time, threading
import distcollect as dc

collector = dc.SyncDataCollector(
    "CartPole-v1", frames_per_batch=64, trace=sys.argv[1], monitor=dc.Monitor(view=False)
)
for batch in collector:
    print("batch", flush=True)
    time.sleep(0.05)
"""


def test_what_is_left_of_a_killed_run_can_be_read(tmp_path: Path, marked: Marked) -> None:
    path = tmp_path / "trace.json"
    with subprocess.Popen(
        [sys.executable, "-c", _KILLED, str(path)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if '"env"' in path.read_text() and '"train"' in path.read_text():
                break
            assert line
        os.kill(process.pid, signal.SIGKILL)
    # Only the end of the array is missing.
    text = path.read_text()
    assert not text.endswith("]\n")
    events = json.loads(text + "]")
    assert_nested(events)
    assert spans(events, "trainer", STEPS)
