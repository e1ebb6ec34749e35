"""Workers that take long to start: what is said meanwhile, and how they end."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import cloudpickle
import gymnasium as gym
import pytest
from helpers.envs import ProcessIdEnv
from helpers.marked import Marked

import distcollect as dc
from distcollect.common import waiting
from distcollect.launch.worker_hosts import WorkerHosts

SOON_S = 60

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Slow:
    """Makes an env once a file is there."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __call__(self) -> gym.Env:  # type: ignore[type-arg]
        deadline = time.monotonic() + 150
        while not self.file.exists():
            assert time.monotonic() < deadline, "nobody was said to make its envs"
            time.sleep(0.05)
        return gym.make("CartPole-v1")


class TouchesFile(logging.Handler):
    """Makes the file when the log says that a worker makes its envs."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file
        self.line = ""

    def emit(self, record: logging.LogRecord) -> None:
        if "which makes its envs" in record.getMessage():
            self.line = record.getMessage()
            self.file.touch()


def test_the_log_says_who_is_awaited(
    marked: Marked, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(waiting, "FIRST_S", 0.2)
    handler = TouchesFile(tmp_path / "said")
    package = logging.getLogger("distcollect")
    package.addHandler(handler)
    try:
        with dc.MultiSyncDataCollector(Slow(handler.file), frames_per_batch=4, num_workers=1):
            pass
    finally:
        package.removeHandler(handler)
    assert handler.line.startswith("0 of 1 workers are ready after ")
    assert "waiting up to 180 s in all for worker 0 (pid " in handler.line
    assert handler.line.endswith(", which makes its envs and policy and tries them")
    assert not marked.left()


def test_a_worker_that_starts_as_the_collector_closes_is_killed_at_once(
    marked: Marked, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collector has told all workers to stop before there is a process to tell it to."""
    collector = dc.MultiSyncDataCollector(ProcessIdEnv, frames_per_batch=2, num_workers=1)
    pid = int(collector.next()["observation"].flatten()[0])
    kill, spawn = WorkerHosts.kill, WorkerHosts.spawn
    closing = threading.Thread(target=collector.shutdown)
    was_killed = threading.Event()

    def note_kill(self: WorkerHosts, worker_id: int, incarnation: int, *why: str) -> None:
        kill(self, worker_id, incarnation, *why)
        if incarnation == 1:
            was_killed.set()

    def spawn_late(self: WorkerHosts, *args: Any) -> None:
        closing.start()
        assert was_killed.wait(SOON_S)
        spawn(self, *args)

    monkeypatch.setattr(WorkerHosts, "kill", note_kill)
    monkeypatch.setattr(WorkerHosts, "spawn", spawn_late)
    os.kill(pid, signal.SIGKILL)
    assert was_killed.wait(SOON_S)
    closing.join(SOON_S)
    assert "did not end within" not in caplog.text
    assert marked.gone(SOON_S), marked.left()
