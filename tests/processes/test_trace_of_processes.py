"""Traces of worker processes: one time line, and a file that can be read after a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import cloudpickle
import torch
from helpers.marked import Marked
from helpers.trace_checks import (
    assert_answered,
    assert_named,
    assert_nested,
    fetches,
    load,
    spans,
)
from torch import nn

import distcollect as dc
from distcollect.telemetry.trace import STEPS, WEIGHTS

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers can't import test modules


class Greedy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.linear(observation).argmax(-1)


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
    # All that is missing is the end of the array.
    text = path.read_text()
    assert not text.endswith("]\n")
    events = json.loads(text + "]")
    assert_nested(events)
    assert spans(events, "trainer", STEPS)


def test_processes_are_on_one_time_line(tmp_path: Path, marked: Marked) -> None:
    path = tmp_path / "trace.json"
    with dc.MultiaSyncDataCollector(
        "CartPole-v1",
        Greedy(),
        frames_per_batch=64,
        num_workers=2,
        trace=path,
        monitor=dc.Monitor(view=False),
    ) as collector:
        for _ in range(20):
            collector.next()
            collector.update_policy_weights_()
    events = load(path)
    assert_named(events, {"trainer", "worker 0", "worker 1"})
    assert_nested(events)
    for worker in ("worker 0", "worker 1"):
        assert_answered(events, worker)
        assert spans(events, worker, WEIGHTS)
        assert fetches(events, worker)
