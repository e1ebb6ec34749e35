"""Runs commands as they are typed, in a folder with files that don't fit."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import cloudpickle
import gymnasium as gym
import pytest

from distcollect.commands import main as cli
from distcollect.launch.run_folder import ENDED, RunFolder

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder with modules to import, and an env id whose module is missing."""
    (tmp_path / "raises_on_import.py").write_text("raise OSError('no licence')\n")
    (tmp_path / "five.py").write_text("five = 5\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    gym.register("Lacking-v0", "no_such_simulator:Env")
    yield tmp_path
    del gym.registry["Lacking-v0"]
    sys.modules.pop("five", None)


@pytest.fixture
def folders(modules: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working folder with folders that are not what a command expects."""
    for name in ("DISTCOLLECT_TOKEN", "DISTCOLLECT_TOKEN_FILE"):
        monkeypatch.setenv(name, "")  # so that monkeypatch restores what a command sets
        monkeypatch.delenv(name)
    (modules / "noise").mkdir()
    (modules / "noise" / "stats.jsonl").write_bytes(b"\xff\xfe\n5\n")
    (modules / "other").mkdir()
    (modules / "other" / "run.json").write_text('{"name": "of another program"}')
    for name, num_tasks in (("unsubmitted", 1), ("run", 1), ("ended", 2)):
        settings = {"command": [], "num_tasks": num_tasks, "num_workers": 0, "patience_s": 1.0}
        folder = RunFolder(modules / name)
        folder.create(settings)
        if name != "unsubmitted":
            folder.write("jobs/7.json", {"id": 7, "trains": True, "submitted": 0})
    RunFolder(modules / "ended").tell(ENDED, why="it is done")


def status_of(typed: str) -> object:
    try:
        return cli.main(shlex.split(typed))
    except SystemExit as error:  # argparse exits
        return error.code
