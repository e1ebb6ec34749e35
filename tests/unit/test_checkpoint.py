"""What a Checkpoint saves, and when."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpointing import check_goes_on_where_it_was
from torch import nn

import distcollect as dc
from distcollect.common import signals
from distcollect.launch.run_folder import ENDED, LISTENING, RUN_VARIABLE, RunFolder, RunOver


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    yield
    signals.stop_watching()


@pytest.mark.parametrize("kind", [dc.SyncDataCollector])
def test_goes_on_where_it_was(tmp_path: Path, kind: Any) -> None:
    check_goes_on_where_it_was(tmp_path, kind)


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
    with pytest.raises(dc.ArgumentTypeError, match="every_s=None"):
        dc.Checkpoint(path, every_s=None, part=nn.Linear(1, 1))  # type: ignore[arg-type]
    with pytest.raises(dc.ArgumentTypeError, match="could not be loaded again"):
        dc.Checkpoint(path, part=Odd()).save()
    assert not list(tmp_path.iterdir())
    dc.Checkpoint(path, part=nn.Linear(1, 1)).save()
    with pytest.raises(dc.CollectorStateError, match=r"is from an earlier run: call load\(\)"):
        dc.Checkpoint(path, part=nn.Linear(1, 1)).step()
    with pytest.raises(dc.ArgumentError, match=r"has the parts \['part'\], not \['other'\]"):
        dc.Checkpoint(path, other=nn.Linear(1, 1)).load()
    path.write_text("nothing of the kind")
    with pytest.raises(dc.ArgumentError, match="can't be read as a checkpoint"):
        dc.Checkpoint(path, part=nn.Linear(1, 1)).load()


def start_of_job(monkeypatch: pytest.MonkeyPatch, job: str, restarts: int) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", job)
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))


def test_a_trainer_that_runs_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SLURM starts it on another host, as it has lost the contact to the first, which goes on."""
    folder = RunFolder(tmp_path)
    monkeypatch.setenv(RUN_VARIABLE, str(tmp_path))
    start_of_job(monkeypatch, "7", 0)
    folder.tell(LISTENING, host="first", port=1)
    module = nn.Linear(1, 1)
    first = dc.Checkpoint(module=module)
    first.save()
    assert folder.later_start() == ""

    start_of_job(monkeypatch, "7", 1)
    folder.tell(LISTENING, host="second", port=2)
    second = dc.Checkpoint(module=module)
    second.load()
    nn.init.constant_(module.weight, 2.0)
    second.save()

    start_of_job(monkeypatch, "7", 0)
    nn.init.constant_(module.weight, 1.0)
    with pytest.raises(dc.LaunchError, match=r"has started job 7 again on .*saves nothing more"):
        first.save()
    monkeypatch.setattr("distcollect.collectors.checkpoint._CHECK_START_S", 0.0)
    with pytest.raises(dc.LaunchError, match="has started job 7 again"):
        first.step()
    folder.tell(ENDED, why="it failed")
    assert folder.address() == ("second", 2)
    second.load()
    assert module.weight.item() == 2.0

    # Who cancels the run is in another job, or in none.
    start_of_job(monkeypatch, "8", 0)
    folder.tell(ENDED, why="it was cancelled")
    with pytest.raises(RunOver, match="it was cancelled"):
        folder.address()
