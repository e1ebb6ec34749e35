"""The examples in ``launch/``: their arithmetic, and a few batches; not how well they learn."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers.example_runs import changed, rows_of, run_example
from tensordict import TensorDict

pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")


@pytest.fixture(scope="module")
def sac() -> ModuleType:
    return importlib.import_module("train_sac")


@pytest.fixture(scope="module")
def impala() -> ModuleType:
    pytest.importorskip("ale_py")
    return importlib.import_module("train_impala")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("train_sac", ["--prioritized"], marks=pytest.mark.slow),
        ("train_sac_torchrl", []),
        ("train_sac", []),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torchrl's
def test_sac_runs(tmp_path: Path, sac: ModuleType, name: str, options: list[str]) -> None:
    if is_torchrl := name.endswith("torchrl"):
        pytest.importorskip("torchrl", reason="torchrl is not installed")
    arguments = ("--total-frames", 1400, "--updates-per-evaluation", 100, "--solved-at", 0)
    done = run_example(name, *arguments, *options, "--out", tmp_path)
    rows = rows_of(done, tmp_path, is_quiet=not is_torchrl)
    assert [row["updates"] for row in rows] == [100, 200, 300][: len(rows)]
    assert len(rows) >= 2
    for row in rows:
        assert -1800 <= row["return"] < 0
        if not is_torchrl:
            # One update per frame after the random ones; RateLimited allows some more or less.
            assert abs(row["frames"] - sac.RANDOM_FRAMES - row["updates"]) <= 200
            assert row["policy_version"] >= row["updates"] // sac.UPDATES_PER_PUSH
    torch.manual_seed(0)  # as at the start of the run
    fresh = importlib.import_module(name).make_actor() if is_torchrl else sac.Learner().actor
    assert changed(tmp_path / "policy.pt", fresh)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torchrl's
def test_ppo_with_torchrls_losses_runs(tmp_path: Path) -> None:
    pytest.importorskip("torchrl", reason="torchrl is not installed")
    done = run_example("train_ppo_torchrl", "--total-frames", 1920, "--out", tmp_path)
    rows = rows_of(done, tmp_path, is_quiet=False)
    assert [row["frames"] for row in rows] == [960, 1920]
    assert all(row["policy_lag"] == 0 for row in rows)
    assert all({"objective_loss", "critic_loss", "entropy_loss"} <= set(row) for row in rows)
    torch.manual_seed(0)  # as at the start of the run
    fresh = importlib.import_module("train_ppo_torchrl").make_actor()
    assert changed(tmp_path / "policy.pt", fresh)


def test_sac_ring_keeps_the_newest(sac: ModuleType) -> None:
    def frames(*numbers: float) -> TensorDict:
        value = torch.tensor(numbers)[:, None]
        return TensorDict(
            {
                "observation": value,
                "action": value,
                "dropped": value,
                "next": {"observation": value, "reward": value, "terminated": value > 5},
            },
            batch_size=len(numbers),
        )

    ring = sac.Ring(5)
    assert len(ring) == 0
    ring.extend(frames(0, 1, 2))
    assert len(ring) == 3
    assert set(ring.sample(200)["observation"].flatten().tolist()) == {0, 1, 2}
    ring.extend(frames(3, 4, 5, 6))
    assert len(ring) == 5
    samples = ring.sample(200)
    assert samples.batch_size == (200,)
    assert set(samples["observation"].flatten().tolist()) == {2, 3, 4, 5, 6}
    assert torch.equal(samples["next", "reward"], samples["observation"])
    assert torch.equal(samples["next", "terminated"], samples["observation"] > 5)
    assert "dropped" not in samples


def test_sac_draws_between_the_bounds(sac: ModuleType) -> None:
    torch.manual_seed(0)
    mean, std = torch.tensor([[-1.0], [0.5], [30.0]]), torch.tensor([[0.5], [1.0], [0.1]])
    policy = sac.SquashedNormal(mean, std)
    assert torch.equal(policy.mode, mean.tanh())
    drawn = policy.sample((1000,))
    assert drawn.abs().max() <= 1
    # Where tanh is rounded to 1 the probability is still finite, as tanh isn't inverted.
    assert policy.log_prob(drawn).isfinite().all()
    assert policy.log_prob(policy.mode).isfinite().all()
    # The density integrates to 1 over all actions.
    action = torch.linspace(-1, 1, 20_001)[1:-1, None]
    density = sac.SquashedNormal(mean[:1], std[:1]).log_prob(action).exp()
    assert torch.trapezoid(density, action.flatten()).item() == pytest.approx(1, abs=1e-3)


def test_sac_bootstraps_unless_terminated(sac: ModuleType) -> None:
    torch.manual_seed(0)
    learner = sac.Learner()
    for critic in learner.target_critics.bodies:
        torch.nn.init.zeros_(critic[-1].weight)
    first, second = (critic[-1].bias for critic in learner.target_critics.bodies)
    first.fill_(10.0)
    second.fill_(20.0)  # the lower one is used
    after = TensorDict(
        {
            "observation": torch.randn(2, 3),
            "reward": torch.tensor([[1.0], [2.0]]),
            "terminated": torch.tensor([[True], [False]]),
        },
        batch_size=2,
    )
    target = learner.target(after, torch.tensor(0.0))
    assert target.flatten().tolist() == pytest.approx([1, 2 + sac.GAMMA * 10])


def test_impala_runs(tmp_path: Path, impala: ModuleType) -> None:
    sizes = ("--envs-per-worker", 2, "--frames-per-batch", 40, "--total-frames", 400)
    done = run_example("train_impala", "--game", "breakout", *sizes, "--out", tmp_path)
    rows = rows_of(done, tmp_path)
    assert [row["frames"] for row in rows] == [40 * batch for batch in range(1, 11)]
    for row in rows:
        assert 0 <= row["policy_lag"] <= row["max_policy_lag"] <= impala.MAX_POLICY_LAG
        assert row["importance_weight"] == pytest.approx(1, abs=0.1)
        assert row["episodes"] == 0 or 0 <= row["return"] <= 20
    assert rows[0]["policy_lag"] == 0
    assert rows[0]["importance_weight"] == pytest.approx(1, abs=1e-4)
    assert rows[-1]["policy_lag"] > 0  # nothing waits
    assert rows[-1]["importance_weight"] != pytest.approx(1, abs=1e-9)
    torch.manual_seed(0)  # as at the start of the run
    assert changed(tmp_path / "policy.pt", impala.ActorCritic(4))


def steps(num_rows: int, num_steps: int) -> tuple[TensorDict, torch.Tensor, torch.Tensor]:
    """Rewards and ends of both kinds for some steps; values before and after them."""
    torch.manual_seed(0)
    shape = num_rows, num_steps, 1
    terminated, truncated = (torch.rand(2, *shape) < 0.1).unbind()
    assert (terminated & ~truncated)[:, :-1].any()
    assert (truncated & ~terminated)[:, :-1].any()
    done = terminated | truncated
    after = {"reward": torch.randn(shape), "terminated": terminated, "done": done}
    value, next_value = torch.randn(2, *shape).unbind()
    next_value[:, :-1] = torch.where(done[:, :-1], next_value[:, :-1], value[:, 1:])
    return TensorDict(after, batch_size=shape[:2]), value, next_value


def test_vtrace_is_that_of_torchrl(impala: ModuleType) -> None:
    functional = pytest.importorskip("torchrl.objectives.value.functional")
    after, value, next_value = steps(8, 20)
    log_pi, log_mu = torch.randn(2, 8, 20, 1).unbind()
    target, advantage = impala.vtrace(after, log_pi - log_mu, value, next_value)
    reward, done, terminated = (after[key] for key in ("reward", "done", "terminated"))
    expected = functional.vtrace_advantage_estimate(
        *(impala.GAMMA, log_pi, log_mu, value, next_value, reward, done, terminated)
    )
    assert torch.allclose(advantage, expected[0], atol=1e-5)
    assert torch.allclose(target, expected[1], atol=1e-5)


def test_impala_looks_at_true_final_observations(impala: ModuleType) -> None:
    torch.manual_seed(0)
    model = impala.ActorCritic(2)
    images = torch.randint(256, (2, 4, 4, 84, 84), dtype=torch.uint8)  # 3 steps, and one ahead
    after = images[:, 1:].clone()
    after[0, 1] = 255  # after it came a reset
    done = torch.zeros(2, 3, 1, dtype=torch.bool)
    done[0, 1] = True
    batch = TensorDict({"next": {"observation": after, "done": done}}, batch_size=[2, 3])
    with torch.no_grad():
        value, expected = (
            model.both(each.flatten(0, 1))[1].view(2, 3, 1) for each in (images[:, :-1], after)
        )
        next_value = impala.next_values(model, batch, value)
    assert torch.allclose(next_value, expected, atol=1e-5)


def test_impala_returns_go_by_trajectory(impala: ModuleType) -> None:
    def batch(traj_ids: list[list[int]], reward: list[list[float]], done: list[list[int]]) -> Any:
        after = {
            "reward": torch.tensor(reward)[..., None],
            "done": torch.tensor(done, dtype=torch.bool)[..., None],
        }
        source = {"traj_ids": torch.tensor(traj_ids)}
        return TensorDict({"next": after, "collector": source}, batch_size=[2, 3])

    episodes = impala.Episodes()
    episodes.add(batch([[1, 1, 3], [2, 2, 2]], [[1, 2, 3], [10, 20, 30]], [[0, 1, 0], [0] * 3]), 6)
    assert episodes.finished == [(6, 3)]
    episodes.add(batch([[7, 7, 7], [8, 8, 8]], [[1, 1, 1], [5, 5, 5]], [[0] * 3] * 2), 12)
    assert episodes.average == 3
    episodes.add(batch([[3, 3, 3], [2, 4, 4]], [[1, 1, 1], [1, 0, 0]], [[0, 0, 1], [1, 0, 0]]), 18)
    assert sorted(episodes.finished) == [(6, 3), (18, 6), (18, 61)]
    assert not episodes.reached(0)  # only after a full window of episodes
