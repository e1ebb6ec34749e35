"""Checkpoints of collectors with workers, and at signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpointing import Constant, Echo, check_goes_on_where_it_was
from helpers.marked import Marked
from helpers.paths import SCRIPTS
from helpers.programs import run_python
from helpers.waiting import eventually

import distcollect as dc
from distcollect.common import signals

SCRIPT = SCRIPTS / "train_with_checkpoint.py"


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    yield
    signals.stop_watching()


def test_goes_on_where_it_was(tmp_path: Path) -> None:
    check_goes_on_where_it_was(tmp_path, dc.MultiSyncDataCollector)


@pytest.mark.parametrize(
    ("mode", "number", "exit_code"),
    [
        # test_without_rpc.py runs this one each time.
        pytest.param("step", signal.SIGTERM, signals.EXIT_TO_RESUME, marks=pytest.mark.slow),
        ("wait", signal.SIGUSR2, signals.EXIT_TO_RESUME),
        ("wait", signal.SIGINT, -signal.SIGINT),
    ],
)
def test_a_signal_saves_and_ends(
    tmp_path: Path, marked: Marked, mode: str, number: signal.Signals, exit_code: int
) -> None:
    """Both in the training loop and while the collector waits for slow frames."""
    path = tmp_path / "c.pt"
    command = [sys.executable, str(SCRIPT), str(path), mode]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        assert next(lines) == "new 0\n"
        assert next(lines) == "running\n"
        process.send_signal(number)
        assert process.wait(timeout=40) == exit_code
    assert marked.gone()
    saved = torch.load(path, weights_only=True)["parts"]["collector"]
    assert saved["frames"] >= 50


# Objects of the script are freed after Python has restored the handlers of signals.
SIGNALLED_AGAIN = """
import os, signal, sys
import distcollect as dc

class Freed:
    def __del__(self):
        os.write(1, b"again")
        os.kill(os.getpid(), signal.SIGTERM)

freed = Freed()
checkpoint = dc.Checkpoint(sys.argv[1], progress={})
signal.raise_signal(signal.SIGTERM)
checkpoint.step()
"""


def test_a_second_signal_at_exit_changes_no_exit_code(tmp_path: Path) -> None:
    ended = run_python("-c", SIGNALLED_AGAIN, tmp_path / "c.pt", timeout_s=60)
    assert (ended.returncode, ended.stdout) == (signals.EXIT_TO_RESUME, "again"), ended.stderr


KILLED = """
import os, signal, sys
import torch
import distcollect as dc

class Killed:
    def state_dict(self):
        return {}
    load_state_dict = state_dict

dc.checkpoint = dc.Checkpoint(sys.argv[1], part=Killed())
torch.load = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # once the draft is written
dc.checkpoint.save()
"""


def test_the_drafts_of_killed_processes_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    assert run_python("-c", KILLED, path, timeout_s=60).returncode == -signal.SIGKILL
    lock = path.with_name(".c.pt.lock")
    [left] = {*tmp_path.iterdir()} - {lock}
    others = [left.with_suffix(f".{os.getppid()}"), left.with_name(f".c.pt.elsewhere{left.suffix}")]
    for each in others:
        each.touch()
    dc.Checkpoint(path, progress={}).save()
    assert {*tmp_path.iterdir()} == {path, lock, *others}


USES = """
import sys, distcollect as dc
dc.Checkpoint(sys.argv[1], progress={}).load()
print("held", flush=True)
sys.stdin.read()
"""


def test_two_runs_can_not_use_one_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c.pt"
    with subprocess.Popen(
        [sys.executable, "-c", USES, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        checkpoint = dc.Checkpoint(path, progress={})
        for use in (checkpoint.load, checkpoint.save):
            with pytest.raises(dc.CollectorStateError, match=f"process {other.pid} uses it"):
                use()
        assert not path.exists()
        with monkeypatch.context() as elsewhere:  # as on a host that may be down
            elsewhere.setattr("socket.gethostname", lambda: "elsewhere")
            assert not checkpoint.load()
        other.kill()
    checkpoint.save()
    assert dc.Checkpoint(path, progress={}).load(), "this process has it already"


def test_the_best_has_the_weights_that_an_inference_server_had(tmp_path: Path) -> None:
    policy = Constant()
    with dc.MultiSyncDataCollector(
        Echo, policy, frames_per_batch=4, num_workers=1, inference=dc.Inference("host")
    ) as collector:
        checkpoint = dc.Checkpoint(
            tmp_path / "c.pt", best="return", policy=policy, collector=collector
        )
        for value in (1.0, 5.0, 3.0):
            torch.nn.init.constant_(policy.value, value)
            collector.evaluate(1)
            checkpoint.step()
            collector.update_policy_weights_(policy)
    saved = torch.load(checkpoint.best_path, weights_only=True)
    assert saved["best"] == ("return", (True, 5.0))
    assert saved["parts"]["policy"]["value"].item() == 5.0


@pytest.mark.parametrize("has_factory", [False, True])
def test_the_best_has_the_weights_that_a_worker_evaluated(
    tmp_path: Path, has_factory: bool
) -> None:
    """Also if the best was followed by another evaluation, and if only the user has the policy."""
    policy = Constant()
    kwargs: dict[str, Any] = {"policy_factory": Constant} if has_factory else {"policy": policy}
    with dc.MultiSyncDataCollector(
        Echo,
        **kwargs,
        frames_per_batch=4,
        num_workers=2,
        evaluation=dc.EvaluationWorkers(num_workers=1, num_episodes=1),
    ) as collector:
        checkpoint = dc.Checkpoint(
            tmp_path / "c.pt", best="return", policy=policy, collector=collector
        )
        for value in (1.0, 5.0, 3.0):
            torch.nn.init.constant_(policy.value, value)
            collector.update_policy_weights_(policy)
            eventually(lambda value=value: collector.stats().evaluation.mean_return == value)
        torch.nn.init.constant_(policy.value, 9.0)
        assert checkpoint.step()
    saved = torch.load(checkpoint.best_path, weights_only=True)
    assert saved["best"] == ("return", (True, 5.0))
    assert saved["parts"]["policy"]["value"].item() == 5.0
