"""The examples in ``launch/``: their arithmetic, and a few batches; not how well they learn."""

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


def run(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return run_python(LAUNCH / f"{name}.py", *arguments, timeout_s=250)


def rows_of(done: subprocess.CompletedProcess[str], out: Path) -> list[dict[str, Any]]:
    """The metrics of a run that ended well, without reaching its target."""
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line]
    assert len(lines) == 1, done.stdout  # the workers print nothing
    assert lines[0].startswith("not solved: ")
    assert "Error" not in done.stderr
    assert "Warning" not in done.stderr
    assert (out / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def changed(weights: Path, fresh: torch.nn.Module) -> bool:
    """Whether the weights in a file fit the module, and differ from its own."""
    before = {key: value.clone() for key, value in fresh.state_dict().items()}
    fresh.load_state_dict(torch.load(weights, weights_only=True))
    return any(not torch.equal(value, before[key]) for key, value in fresh.state_dict().items())


def test_sac_runs(tmp_path: Path, sac: ModuleType) -> None:
    arguments = ("--total-frames", 1400, "--updates-per-evaluation", 100, "--solved-at", 0)
    rows = rows_of(run("train_sac", *arguments, "--out", tmp_path), tmp_path)
    assert [row["updates"] for row in rows] == [100, 200, 300][: len(rows)]
    assert len(rows) >= 2
    for row in rows:
        # One update per frame after the random ones; RateLimited allows some more or less.
        assert abs(row["frames"] - sac.RANDOM_FRAMES - row["updates"]) <= 200
        assert row["policy_version"] >= row["updates"] // sac.UPDATES_PER_PUSH
        assert -1800 <= row["return"] < 0
    torch.manual_seed(0)  # as at the start of the run
    assert changed(tmp_path / "policy.pt", sac.Learner().actor)


def test_sac_target_not_reached(tmp_path: Path) -> None:
    done = run("train_sac", "--total-frames", 1100, "--require-solved", "--out", tmp_path)
    assert done.returncode == 1
    assert done.stdout.startswith("not solved: mean return of 10 episodes unknown after 1,1")
    assert "Traceback" not in done.stderr


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


def test_sac_follows_slowly(sac: ModuleType) -> None:
    learner = sac.Learner()
    old, new = (critics.bodies[0][0].bias for critics in (learner.target_critics, learner.critics))
    with torch.no_grad():
        old.zero_()
        new.fill_(1.0)
    learner.follow()
    assert torch.allclose(old, torch.tensor(sac.TARGET_RATE))
    assert torch.equal(new, torch.ones_like(new))


def test_impala_runs(tmp_path: Path, impala: ModuleType) -> None:
    sizes = ("--envs-per-worker", 2, "--frames-per-batch", 40, "--total-frames", 400)
    rows = rows_of(run("train_impala", "--game", "breakout", *sizes, "--out", tmp_path), tmp_path)
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


@pytest.mark.parametrize(("rho_max", "c_max"), [(1.0, 1.0), (2.0, 0.5)])
def test_vtrace_is_the_sum_of_the_paper(
    impala: ModuleType, monkeypatch: pytest.MonkeyPatch, rho_max: float, c_max: float
) -> None:
    monkeypatch.setattr(impala, "RHO_MAX", rho_max)
    monkeypatch.setattr(impala, "C_MAX", c_max)
    num_rows, num_steps, gamma = 6, 12, impala.GAMMA
    after, value, next_value = steps(num_rows, num_steps)
    log_ratio = torch.randn(num_rows, num_steps, 1)
    target, advantage = impala.vtrace(after, log_ratio, value, next_value)
    for row in range(num_rows):
        reward, done, terminated, v, next_v, ratio = (
            each[row].flatten().tolist()
            for each in (
                *(after[key] for key in ("reward", "done", "terminated")),
                *(value, next_value, log_ratio.exp()),
            )
        )
        next_v = [0.0 if over else each for over, each in zip(terminated, next_v, strict=True)]
        for start in range(num_steps):
            expected, weight = v[start], 1.0
            for step in range(start, num_steps):
                error = reward[step] + gamma * next_v[step] - v[step]
                expected += weight * min(rho_max, ratio[step]) * error
                weight *= gamma * min(c_max, ratio[step])
                if done[step]:
                    break
            assert target[row, start].item() == pytest.approx(expected, abs=1e-4)
            is_last = done[start] or start == num_steps - 1
            following = next_v[start] if is_last else target[row, start + 1].item()
            gain = min(rho_max, ratio[start]) * (reward[start] + gamma * following - v[start])
            assert advantage[row, start].item() == pytest.approx(gain, abs=1e-4)


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
