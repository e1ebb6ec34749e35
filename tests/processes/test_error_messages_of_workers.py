"""Messages about workers and of commands that start processes; the table of errors in the docs."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers.bad_calls import ARGUMENTS, RUNNING, raising_maker, raising_policy
from helpers.bad_launches import LAUNCHES
from helpers.command_line import folders, modules, status_of
from helpers.error_rows import ARGUMENT, KIND, Row, check, rpc, said
from helpers.marked import Marked
from helpers.paths import ROOT
from helpers.policies import GreedyPolicy
from torch import nn

import distcollect as dc
from distcollect.launch.run_folder import RunFolder

__all__ = ["folders", "modules"]

cloudpickle.register_pickle_by_value(sys.modules[__name__])


ERRORS = (ROOT / "distcollect" / "docs" / "errors.md").read_text()


@pytest.mark.parametrize(
    ("typed", "question"),
    [
        (
            "submit --trust-folder --run-folder new five.py",
            "would not run the trainer: the controller is.*'sinfo' finds no cluster either.*Log in",
        ),
        ("cancel submitted", "SLURM refused 'scancel 12': .*down.*Try again"),
    ],
)
@pytest.mark.usefixtures("folders")
def test_of_a_slurm_that_is_down(
    typed: str,
    question: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("sbatch", "srun", "sinfo", "scontrol", "scancel"):
        (tmp_path / name).write_text("#!/bin/sh\necho the controller is down >&2\nexit 1\n")
        (tmp_path / name).chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    run = RunFolder(tmp_path / "submitted")
    run.create({"command": [], "num_tasks": 1, "num_workers": 0, "patience_s": 1.0})
    run.write("jobs/12.json", {"id": "12", "trains": True, "submitted": 1.0})
    assert status_of(typed) == 2
    said_of_it = capsys.readouterr().err
    assert re.search(question, said_of_it, re.DOTALL), said_of_it
    assert "the controller is down" in said_of_it
    assert not (tmp_path / "new").exists()


class Moody(gym.Env[Any, Any]):
    """Its steps take 0.6 s after ``set_mood("slow")``."""

    observation_space = spaces.Box(-1, 1, (4,), np.float32)
    action_space = spaces.Discrete(2)
    mood = "fine"

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        return np.zeros(4, np.float32), {}

    def set_mood(self, mood: str) -> int:
        self.mood = mood
        return os.getpid()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        if self.mood == "slow":
            time.sleep(0.6)
        return np.zeros(4, np.float32), 0.0, False, False, {}


def odd_policy(observation: torch.Tensor) -> torch.Tensor:
    return torch.zeros(1, 5)


STRICT = dc.Faults(max_restarts=0, start_timeout_s=60.0)


def test_of_workers(marked: Marked) -> None:
    """Messages that need a worker process; starts one worker four times."""
    one: dict[str, Any] = {"num_workers": 1, "faults": STRICT}
    check(
        (lambda: rpc(create_env_fn=raising_maker, **one), dc.EnvError, "worker 0: env 0", "no lic")
    )
    check(
        (lambda: rpc(policy=odd_policy, **one), dc.PolicyError, r"worker 0: .*\[1, 5\]", r"\[1\]")
    )
    check(
        (lambda: rpc(policy=raising_policy, **one), dc.PolicyError, "IndexError", "not like this")
    )
    weights = nn.Linear(4, 2)
    factory = {"policy_factory": GreedyPolicy}
    with rpc(create_env_fn=Moody, **{**one, **factory}) as collector:
        pid = collector.call("set_mood", "fine")[0][0]
        rows: list[Row] = [
            (
                lambda: collector.update_policy_weights_(weights),
                dc.WeightsError,
                "net.weight",
                "don't fit.*Nothing was sent",
            ),
            (
                collector.update_policy_weights_,
                KIND,
                "policy_factory",
                "pass the weights",
            ),
            (lambda: collector.update_policy_weights_(5), KIND, "int", "a module, a TensorDict"),
            (lambda: collector.call("fly"), dc.EnvError, "worker 0.*fly", "no"),
            (lambda: collector.release([2]), ARGUMENT, r"worker_ids=\[2\]", r"there are \[0\]"),
        ]
        for row in rows:
            check(row)
        collector.next()
        collector.call("set_mood", "slow")
        check(
            (
                lambda: [collector.next(0.4) for _ in range(9)],
                dc.BatchTimeout,
                r"0.4 s; waited for .*; worker 0 is in step \(\S+:\d+\)",
                "batch_timeout_s",
            )
        )
        os.kill(pid, signal.SIGKILL)
        check(
            (
                lambda: [collector.next() for _ in range(9)],
                dc.WorkerLost,
                "worker 0: its process ended: .*SIGKILL",
                f"{pid}",
            )
        )
    assert not marked.left()


@pytest.mark.usefixtures("modules")
def test_the_table_of_errors_has_them_as_they_are() -> None:
    starts = re.findall(r"^\| `(.*?)` \|", ERRORS, re.MULTILINE)
    assert len(starts) == 11
    if not any("its process ended" in message for message in said):
        pytest.skip("the test of workers was not run")
    for row in (*ARGUMENTS, *RUNNING, *LAUNCHES):
        check(row)
    for start in starts:
        pattern = ".*?".join(map(re.escape, start.split("…")))
        assert any(re.match(pattern, message, re.DOTALL) for message in said), start
