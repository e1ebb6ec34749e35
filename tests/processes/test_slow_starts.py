"""What is said while workers take long to start."""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path

import cloudpickle
import gymnasium as gym
import pytest
from helpers.marked import Marked

import distcollect as dc
from distcollect.common import reminder

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
    monkeypatch.setattr(reminder, "FIRST_S", 0.2)
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
