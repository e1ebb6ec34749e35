"""What a Checkpoint saves, and when."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.paths import SCRIPTS
from helpers.scripts.marked import Marked
from torch import nn

import distcollect as dc
from distcollect.launch import preemption as notice

SCRIPT = SCRIPTS / "checkpointed.py"


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    yield
    notice.stop_watching()


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, observation: torch.Tensor) -> Any:
        rows = len(observation)
        return torch.zeros(rows, dtype=torch.int64), {"seen": self.weight.detach().expand(rows)}


def training(kind: Any, path: Path, **kwargs: Any) -> tuple[Any, ...]:
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=1.0)
    collector = kind("CartPole-v1", policy, frames_per_batch=20, **kwargs)
    parts = {"policy": policy, "optimizer": optimizer, "collector": collector}
    return policy, optimizer, collector, dc.Checkpoint(path, every_s=3600, **parts)


def learn(policy: Policy, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    (-policy.weight).backward()
    optimizer.step()


@pytest.mark.parametrize("kind", [dc.SyncDataCollector, dc.MultiSyncDataCollector])
def test_goes_on_where_it_was(tmp_path: Path, kind: Any) -> None:
    path = tmp_path / "deep" / "checkpoint.pt"
    kwargs = {} if kind is dc.SyncDataCollector else {"num_workers": 1}
    policy, optimizer, collector, checkpoint = training(kind, path, **kwargs)
    with collector:
        assert not checkpoint.load()
        for _ in range(3):
            collector.next()
            learn(policy, optimizer)
            assert not checkpoint.step()
            collector.update_policy_weights_(policy)
        checkpoint.save()
        version, frames = collector.policy_version, collector.frames
    assert [file.name for file in path.parent.iterdir()] == ["checkpoint.pt"]

    resumed, again, collector, checkpoint = training(kind, path, **kwargs)
    with collector:
        assert checkpoint.load()
        assert torch.equal(resumed.weight, policy.weight)
        assert again.state_dict()["state"][0]["step"] == 3
        assert collector.frames == frames == 60
        # Workers have what was loaded, and say so.
        batch = collector.next()
        assert (batch["seen"] == policy.weight.item()).all()
        assert (batch["collector", "policy_version"] == version + 1).all()


def test_saves_when_it_is_time(tmp_path: Path) -> None:
    part = nn.Linear(1, 1)
    checkpoint = dc.Checkpoint(tmp_path / "c.pt", every_s=1e-9, part=part)
    assert checkpoint.step()
    with torch.no_grad():
        part.weight.fill_(7.0)
    assert checkpoint.step()
    with torch.no_grad():
        part.weight.fill_(8.0)
    assert checkpoint.load()
    assert part.weight.item() == 7.0


class Odd:
    def state_dict(self) -> object:
        return {"path": Path("a")}

    def load_state_dict(self, state: object) -> None: ...


def test_mistakes(tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    with pytest.raises(dc.ArgumentError, match="nothing to save"):
        dc.Checkpoint(path)
    with pytest.raises(dc.ArgumentTypeError, match="step=int: has no state_dict"):
        dc.Checkpoint(path, step=3)  # type: ignore[arg-type]
    with pytest.raises(dc.ArgumentError, match="every_s=0"):
        dc.Checkpoint(path, every_s=0, part=nn.Linear(1, 1))
    with pytest.raises(dc.ArgumentTypeError, match="could not be loaded again"):
        dc.Checkpoint(path, part=Odd()).save()
    assert not list(tmp_path.iterdir())
    dc.Checkpoint(path, part=nn.Linear(1, 1)).save()
    with pytest.raises(dc.CollectorStateError, match=r"is there from before: call load\(\)"):
        dc.Checkpoint(path, part=nn.Linear(1, 1)).step()
    with pytest.raises(dc.ArgumentError, match=r"has the parts \['part'\], not \['other'\]"):
        dc.Checkpoint(path, other=nn.Linear(1, 1)).load()
    path.write_text("nothing of the kind")
    with pytest.raises(dc.ArgumentError, match="can't be read as a checkpoint"):
        dc.Checkpoint(path, part=nn.Linear(1, 1)).load()


@pytest.mark.parametrize(("mode", "number"), [("step", signal.SIGTERM), ("wait", signal.SIGUSR2)])
def test_a_signal_saves_and_ends(
    tmp_path: Path, marked: Marked, mode: str, number: signal.Signals
) -> None:
    """In the loop, and also while the collector waits for frames that take long."""
    path = tmp_path / "c.pt"
    command = [sys.executable, str(SCRIPT), str(path), mode]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        assert next(lines) == "new 0\n"
        assert next(lines) == "running\n"
        process.send_signal(number)
        assert process.wait(timeout=40) == notice.EXIT_TO_RESUME
    assert marked.gone()
    saved = torch.load(path, weights_only=True)["parts"]["collector"]
    assert saved["frames"] >= 50
