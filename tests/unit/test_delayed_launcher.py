"""``submitit_delayed_launcher`` asks SLURM for what submitit would ask for."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import distcollect as dc

SbatchFiles = Callable[..., tuple[str, str]]


@pytest.fixture
def sbatch_files(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> SbatchFiles:
    """The sbatch file of the trainer, and that of the workers, for a script's decorator."""
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "1"])
    monkeypatch.setattr(sys.modules["__main__"], "__file__", __file__)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)

    def make(num_jobs: int, **given: Any) -> tuple[str, str]:
        folder = tmp_path / "run"
        options = ["--dry-run", "--trust-folder", "--run-folder", str(folder)]
        decorate = dc.submitit_delayed_launcher(num_jobs, submit_options=options, **given)
        assert decorate(lambda: None)() is None
        assert not folder.exists()
        trainer, workers = capsys.readouterr().out.split("# workers: ")
        return trainer, workers

    return make


def test_each_job_requests_what_its_dict_says(sbatch_files: SbatchFiles) -> None:
    trainer, workers = sbatch_files(
        2,
        framework="rpc",
        tcpport=1234,
        submitit_main_conf={
            "slurm_time": "30:00",
            "timeout_min": 10,
            "slurm_partition": "few",
            "slurm_setup": ["module load cuda"],
        },
        submitit_collection_conf={
            "timeout_min": 20,
            "slurm_ntasks_per_node": 4,
            "slurm_account": "other",
            "slurm_cpus_per_task": None,
            "slurm_additional_parameters": {"exclude": "node7", "mail_type": "END", "hold": True},
            "slurm_mail_user": "me",
            "slurm_exclusive": True,
        },
    )
    assert "#SBATCH --time=30\n" in trainer  # slurm_time takes precedence over timeout_min
    assert "#SBATCH --partition=few\n" in trainer
    assert "module load cuda\n" in trainer
    assert "account" not in trainer
    assert workers.startswith("4 task(s), 2 times\n")
    named = ("time=20", "account=other", "exclude=node7", "mail-user=me", "mail-type=END")
    for line in (*named, "exclusive", "hold"):
        assert f"#SBATCH --{line}\n" in workers


def test_what_a_script_changed_in_torchrl_s_defaults_is_requested(
    monkeypatch: pytest.MonkeyPatch, sbatch_files: SbatchFiles
) -> None:
    defaults = pytest.importorskip("torchrl.collectors.distributed.default_configs")
    monkeypatch.setitem(defaults.DEFAULT_SLURM_CONF, "slurm_partition", "many")
    monkeypatch.setitem(defaults.DEFAULT_SLURM_CONF_MAIN, "slurm_partition", "few")
    trainer, workers = sbatch_files(3)
    assert "--partition=few\n" in trainer
    assert "--cpus-per-task=32\n" in trainer
    assert "--partition=many\n" in workers
    assert workers.startswith("1 task(s), 3 times\n")


def test_a_notebook_has_no_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys.modules["__main__"], "__file__")
    with pytest.raises(dc.LaunchError, match="save the code as a file"):
        dc.submitit_delayed_launcher(1)(lambda: None)()
