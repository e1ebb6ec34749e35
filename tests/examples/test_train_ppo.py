"""``launch/train_ppo.py``: its arithmetic, and a short run by python and by torchrun."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers.example_runs import TORCHRUN, changed, rows_of, run_example
from tensordict import TensorDict

import distcollect as dc

pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

pytestmark = pytest.mark.timeout(600)  # two runs in a fixture, on a busy machine


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return importlib.import_module("train_ppo")


def column(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)[None, :, None]


def flags(*values: int) -> torch.Tensor:
    return column(*values, dtype=torch.bool)


def after(reward: torch.Tensor, terminated: torch.Tensor, truncated: torch.Tensor) -> TensorDict:
    return TensorDict(
        {"reward": reward, "terminated": terminated, "done": terminated | truncated},
        batch_size=reward.shape[:2],
    )


def test_gae_by_hand(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "GAMMA", 0.5)
    monkeypatch.setattr(script, "LAMBDA", 0.5)
    # Steps 0-1 end in a termination, 2-3 in a truncation; 4-5 continue after the batch.
    step = after(column(1, 2, 3, 4, 5, 6), flags(0, 1, 0, 0, 0, 0), flags(0, 0, 0, 1, 0, 0))
    value = column(10, 20, 30, 40, 50, 60)
    next_value = column(20, 1000, 40, 80, 60, 100)
    delta = [
        1 + 0.5 * 20 - 10,  # 1
        2 - 20,  # -18: the value after a termination does not count
        3 + 0.5 * 40 - 30,  # -7
        4 + 0.5 * 80 - 40,  # 4: the value of the final state counts, though the episode is over
        5 + 0.5 * 60 - 50,  # -15
        6 + 0.5 * 100 - 60,  # -4
    ]
    expected = column(
        delta[0] + 0.25 * delta[1],  # -3.5
        delta[1],  # nothing from after the termination
        delta[2] + 0.25 * delta[3],  # -6
        delta[3],  # nor from after the truncation
        delta[4] + 0.25 * delta[5],  # -16
        delta[5],
    )
    assert expected.flatten().tolist() == [-3.5, -18, -6, 4, -16, -4]
    assert torch.equal(script.gae(step, value, next_value), expected)


def test_returns_are_carried_from_batch_to_batch(script: ModuleType) -> None:
    def batch(reward: list[list[float]], done: list[list[int]]) -> TensorDict:
        rows = {"reward": torch.tensor(reward), "done": torch.tensor(done, dtype=torch.bool)}
        following = {key: value.unsqueeze(-1) for key, value in rows.items()}
        return TensorDict({"next": following}, batch_size=[2, 3])

    episodes = script.Episodes()
    assert episodes.average is None
    episodes.add(batch([[1, 2, 3], [10, 20, 30]], [[0, 1, 0], [0, 0, 0]]))
    assert episodes.finished == [(4, 3)]
    episodes.add(batch([[4, 5, 6], [40, 50, 60]], [[1, 0, 0], [1, 1, 0]]))
    assert episodes.finished == [(4, 3), (8, 7), (8, 100), (10, 50)]
    assert episodes.average == 40
    assert not episodes.reached(0)  # only after a full window of episodes
    for _ in range(script.WINDOW):
        episodes.add(batch([[0, 0, 5], [0, 0, 5]], [[0, 0, 1], [0, 0, 1]]))
    assert episodes.reached(5)
    assert not episodes.reached(5.1)


def test_short_runs(tmp_path: Path, script: ModuleType) -> None:
    """By python and by torchrun the same is learned."""
    learned = []
    for launcher in ((), (*TORCHRUN, "--nproc-per-node=3")):
        out = tmp_path / f"by{len(launcher)}" / "new" / "folder"
        done = run_example("train_ppo", "--total-frames", 3000, "--out", out, launcher=launcher)
        rows = rows_of(done, out)
        assert str(out) in done.stdout
        assert "frames/s, return=" in done.stderr
        assert "policy lag=0" in done.stderr
        assert [row["frames"] for row in rows] == [960, 1920, 2880]
        for row in rows:
            assert row.pop("frames_per_s") > 0
            assert row.pop("seconds") > 0
            assert row["policy_lag"] == 0  # on-policy
            assert row["episodes"] > 0
            assert 8 <= row["return"] <= 500
        assert rows[-1]["return"] > rows[0]["return"]
        model = script.ActorCritic()
        assert changed(out / "policy.pt", model)
        assert model(torch.zeros(5, 4)).sample().shape == (5,)
        learned.append(rows)
    assert learned[0] == learned[1]


def test_it_continues_from_its_checkpoint(tmp_path: Path) -> None:
    frames = []
    for total in (960, 1920):
        to = ("--out", tmp_path, "--checkpoint", tmp_path / "ppo.pt")
        done = run_example("train_ppo", "--total-frames", total, *to)
        frames.append([row["frames"] for row in rows_of(done, tmp_path)])
    assert frames == [[960], [960, 1920]]


def test_target_not_reached(tmp_path: Path) -> None:
    done = run_example("train_ppo", "--total-frames", 960, "--require-solved", "--out", tmp_path)
    assert done.returncode == 1
    assert done.stdout.startswith("not solved")
    assert "Traceback" not in done.stderr


@pytest.fixture
def _one_thread() -> Iterator[None]:  # small networks: several threads take longer
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def scaled_cartpole() -> gym.Env[np.ndarray, np.int64]:
    space = gym.spaces.Box(-np.inf, np.inf, (4,), np.float32)
    env = gym.make("CartPole-v1")
    return gym.wrappers.TransformObservation(env, lambda x: np.float32(1000 * x + 20_000), space)


@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize(
    ("normalize", "learns"),
    [pytest.param(None, False, marks=pytest.mark.slow), (dc.Normalize(), True)],
)
def test_learns_from_observations_of_any_scale_if_they_are_normalised(
    script: ModuleType, normalize: dc.Normalize | None, learns: bool
) -> None:
    torch.manual_seed(2)
    model = script.ActorCritic()
    losses, optimizer = script.Losses(model), torch.optim.Adam(model.parameters(), 1e-3)
    frames = {"frames_per_batch": 1600, "total_frames": 12_800, "envs_per_worker": 8}
    with dc.SyncDataCollector(scaled_cartpole, model, normalize=normalize, **frames) as collector:
        collector.set_seed(2)
        for batch in collector:
            script.learn(model, losses, optimizer, batch)
        assert (collector.evaluate(10, seed=0).returns.mean() > 150) == learns
