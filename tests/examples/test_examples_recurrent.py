"""Recurrent PPO, and PPO by two trainers: arithmetic and a few batches, not how they learn."""

from __future__ import annotations

import importlib
import json
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers.paths import LAUNCH
from helpers.programs import run_python

import distcollect as dc

pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

pytestmark = pytest.mark.timeout(600)  # on a busy machine


@pytest.fixture(scope="module")
def recurrent() -> ModuleType:
    return importlib.import_module("train_recurrent_ppo")


def run(*command: object) -> subprocess.CompletedProcess[str]:
    return run_python(*command, timeout_s=200)


def check_run(done: subprocess.CompletedProcess[str], out: Path) -> list[dict[str, Any]]:
    """The metrics of a run that ended well, before its policy was good."""
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line]
    assert len(lines) == 1, done.stdout  # only one of the processes reports
    assert lines[0].startswith("not solved: average return ")
    assert "Error" not in done.stderr
    assert "Warning" not in done.stderr
    assert (out / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        assert row["policy_lag"] == 0
        assert 8 <= row["return"] <= 500
    return rows


def test_velocities_are_hidden(recurrent: ModuleType) -> None:
    env = recurrent.make_env()
    observation, _ = env.reset(seed=0)
    whole = env.unwrapped.state
    assert observation.tolist() == pytest.approx([whole[0], whole[2]])
    assert env.observation_space.contains(observation)


def test_the_learner_goes_where_the_policy_went(recurrent: ModuleType) -> None:
    """Before the first training step, sequences give the recorded probabilities."""
    torch.manual_seed(0)
    model = recurrent.RecurrentActorCritic()
    torch.nn.init.normal_(model.actor.weight)  # so that the state makes a difference
    make = [recurrent.make_env] * 3
    with dc.SyncDataCollector(make, model, frames_per_batch=192, total_frames=-1) as collector:
        for _ in range(2):
            batch = collector.next()
            sequences = batch.unflatten(1, (4, 16)).flatten(0, 1)
            assert sequences["is_init"][:, 1:].any()
            assert not sequences["is_init"][:, 0].all()
            policy, value = model.evaluate(sequences)
            recorded = sequences["action_log_prob"]
            torch.testing.assert_close(policy.log_prob(sequences["action"]), recorded)
            # Here each frame uses its own state instead of the sequence's first one.
            torch.testing.assert_close(value, model.value(sequences))
            following = model.value(batch["next"])[:, :-1]
            ongoing = ~batch["next", "done"][:, :-1]
            torch.testing.assert_close(following[ongoing], model.value(batch)[:, 1:][ongoing])


@pytest.mark.parametrize("options", [(), ("--feed-forward",)])
def test_recurrent_run(recurrent: ModuleType, tmp_path: Path, options: tuple[str, ...]) -> None:
    size = ("--frames-per-batch", 256, "--total-frames", 512)
    script = LAUNCH / "train_recurrent_ppo.py"
    rows = check_run(run(script, *size, *options, "--out", tmp_path), tmp_path)
    assert [row["frames"] for row in rows] == [256, 512]
    if not options:
        model = recurrent.RecurrentActorCritic()
        model.load_state_dict(torch.load(tmp_path / "policy.pt", weights_only=True))


def test_sequences_must_fit(tmp_path: Path) -> None:
    size = ("--frames-per-batch", 300, "--num-workers", 2, "--envs-per-worker", 4)
    done = run(LAUNCH / "train_recurrent_ppo.py", *size, "--out", tmp_path)
    assert done.returncode == 2
    assert "must be a multiple of 128" in done.stderr


def test_ddp_run(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=5")
    size = ("--frames-per-batch", 240, "--total-frames", 480)
    out = tmp_path / "ddp"
    rows = check_run(run(*launcher, LAUNCH / "train_ddp.py", *size, "--out", out), out)
    # All frames count, though one of the trainers has two of the three workers.
    assert [row["frames"] for row in rows] == [240, 480]
