"""The examples with TorchRL's losses: a few batches; not how well they learn."""

from __future__ import annotations

import importlib
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.paths import LAUNCH
from helpers.programs import run_python

pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")
pytest.importorskip("torchrl", reason="torchrl is not installed")


def run(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return run_python(LAUNCH / f"{name}.py", *arguments, timeout_s=250)


def rows_of(done: subprocess.CompletedProcess[str], out: Path) -> list[dict[str, Any]]:
    """The metrics of a run that ended well, without reaching its target."""
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("not solved: ")
    assert (out / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def changed(weights: Path, name: str) -> bool:
    """Whether the weights in a file fit a new actor of the script, and differ from its own."""
    torch.manual_seed(0)  # as at the start of the run
    fresh = importlib.import_module(name).make_actor()
    saved = torch.load(weights, weights_only=True)
    before = {key: value.clone() for key, value in fresh.state_dict().items()}
    fresh.load_state_dict(saved)
    return any(not torch.equal(value, before[key]) for key, value in saved.items())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torchrl's
def test_ppo_runs(tmp_path: Path) -> None:
    rows = rows_of(run("train_ppo_torchrl", "--total-frames", 1920, "--out", tmp_path), tmp_path)
    assert [row["frames"] for row in rows] == [960, 1920]
    assert all(row["policy_lag"] == 0 for row in rows)
    assert all({"objective_loss", "critic_loss", "entropy_loss"} <= set(row) for row in rows)
    assert changed(tmp_path / "policy.pt", "train_ppo_torchrl")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_sac_runs(tmp_path: Path) -> None:
    arguments = ("--total-frames", 1400, "--updates-per-evaluation", 100, "--solved-at", 0)
    rows = rows_of(run("train_sac_torchrl", *arguments, "--out", tmp_path), tmp_path)
    assert [row["updates"] for row in rows] == [100, 200, 300][: len(rows)]
    assert len(rows) >= 2
    assert all(-1800 <= row["return"] < 0 for row in rows)
    assert changed(tmp_path / "policy.pt", "train_sac_torchrl")
