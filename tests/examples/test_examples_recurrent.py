"""Recurrent PPO, and PPO by two trainers: arithmetic and a few batches, not how they learn."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch
from helpers.example_runs import TORCHRUN, rows_of, run_example

import distcollect as dc

pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

pytestmark = pytest.mark.timeout(600)  # on a busy machine


@pytest.fixture(scope="module")
def recurrent() -> ModuleType:
    return importlib.import_module("train_recurrent_ppo")


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
    done = run_example("train_recurrent_ppo", *size, *options, "--out", tmp_path)
    rows = rows_of(done, tmp_path)
    assert all(row["policy_lag"] == 0 for row in rows)
    assert [row["frames"] for row in rows] == [256, 512]
    if not options:
        model = recurrent.RecurrentActorCritic()
        model.load_state_dict(torch.load(tmp_path / "policy.pt", weights_only=True))


def test_ddp_run(tmp_path: Path) -> None:
    size = ("--frames-per-batch", 240, "--total-frames", 480)
    out = tmp_path / "ddp"
    launcher = (*TORCHRUN, "--nproc-per-node=5")
    rows = rows_of(run_example("train_ddp", *size, "--out", out, launcher=launcher), out)
    # All frames count, though one of the trainers has two of the three workers.
    assert [row["frames"] for row in rows] == [240, 480]
