"""``launch/train_ppo.py``: its arithmetic, and a short run by python and by torchrun."""

from __future__ import annotations

import importlib
import json
import subprocess
from dataclasses import dataclass
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

SCRIPT = LAUNCH / "train_ppo.py"
pytestmark = pytest.mark.timeout(600)  # two runs in a fixture, on a busy machine

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return importlib.import_module("train_ppo")


def run(launcher: tuple[str, ...], *arguments: object) -> subprocess.CompletedProcess[str]:
    return run_python(*launcher, SCRIPT, *arguments, timeout_s=250)


def metrics(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


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


def test_gae_keeps_rows_apart(script: ModuleType) -> None:
    torch.manual_seed(0)
    reward, value, next_value = torch.randn(3, 4, 7, 1).unbind()
    terminated, truncated = (torch.rand(2, 4, 7, 1) < 0.2).unbind()
    together = script.gae(after(reward, terminated, truncated), value, next_value)
    for row in range(4):
        one = slice(row, row + 1)
        alone = script.gae(
            after(reward[one], terminated[one], truncated[one]), value[one], next_value[one]
        )
        assert torch.equal(together[one], alone)


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


@dataclass
class Run:
    process: subprocess.CompletedProcess[str]
    out: Path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """The same short run by python and by torchrun."""
    done = {}
    for name, launcher in (("python", ()), ("torchrun", TORCHRUN)):
        out = tmp_path_factory.mktemp(name) / "new" / "folder"
        done[name] = Run(run(launcher, "--total-frames", 3000, "--out", out), out)
    return done


@pytest.mark.parametrize("name", ["python", "torchrun"])
def test_short_run(runs: dict[str, Run], name: str, script: ModuleType) -> None:
    process, out = runs[name].process, runs[name].out
    assert process.returncode == 0, process.stderr
    lines = [line for line in process.stdout.splitlines() if line]
    assert len(lines) == 1, process.stdout  # the workers print nothing
    assert lines[0].startswith("not solved: average return ")
    assert str(out) in lines[0]
    assert "frames/s, return=" in process.stderr
    assert "policy lag=0" in process.stderr
    assert "Error" not in process.stderr
    assert "Warning" not in process.stderr

    rows = metrics(out)
    assert [row["frames"] for row in rows] == [960, 1920, 2880]
    for row in rows:
        assert row["frames_per_s"] > 0
        assert row["policy_lag"] == 0  # on-policy
        assert row["episodes"] > 0
        assert 8 <= row["return"] <= 500
    assert rows[-1]["return"] > rows[0]["return"]

    assert (out / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    model = script.ActorCritic()
    first = {key: value.clone() for key, value in model.state_dict().items()}
    model.load_state_dict(torch.load(out / "policy.pt", weights_only=True))
    assert any(not torch.equal(value, first[key]) for key, value in model.state_dict().items())
    assert model(torch.zeros(5, 4)).sample().shape == (5,)


def test_both_launches_learn_the_same(runs: dict[str, Run]) -> None:
    learned = []
    for each in runs.values():
        rows = metrics(each.out)
        for row in rows:
            del row["seconds"], row["frames_per_s"]
        learned.append(rows)
    assert learned[0] == learned[1]


def test_target_not_reached(tmp_path: Path) -> None:
    done = run((), "--total-frames", 960, "--require-solved", "--out", tmp_path)
    assert done.returncode == 1
    assert done.stdout.startswith("not solved")
    assert "Traceback" not in done.stderr


def test_stops_at_the_target(tmp_path: Path) -> None:
    done = run((), "--solved-at", 15, "--require-solved", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("solved")
    rows = metrics(tmp_path)
    assert rows[-1]["episodes"] >= 100 > rows[-2]["episodes"]


def test_frames_must_divide(tmp_path: Path) -> None:
    done = run((), "--num-workers", 7, "--out", tmp_path)
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("952 or 980 would do")
