"""``distcollect submit``: its arguments, its files, and how it reads SLURM's answers."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import stat
from pathlib import Path

import pytest
from helpers.command_line import status_of
from helpers.paths import SCRIPTS

import distcollect as dc
from distcollect.commands.main import main
from distcollect.integrations.slurm import status
from distcollect.integrations.slurm.submit import check_folder, minutes
from distcollect.launch.run_folder import ENDED, LISTENING, REQUEUED, NotYet, RunFolder, RunOver

SCRIPT = SCRIPTS / "train_submitted.py"


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    settings = {"name": "test", "num_workers": 1, "num_tasks": 1, "patience_s": 3.0}
    folder.create({**settings, "command": ["python", "train.py"]})
    return folder


def dry(*options: object) -> list[str]:
    return [str(word) for word in ("submit", "--dry-run", "--trust-folder", *options)]


def test_dry_run_prints_the_sbatch_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")  # it needs no SLURM
    folder = tmp_path / "run"
    trainer = ["--gpus-per-node", 1, "--cpus-per-task", 8, "--time", "1-12", "-p", "gpu"]
    workers = ["--worker-jobs", 8, "--worker-tasks", 8, "--worker-cpus", 2]
    further = ["--slurm", "constraint=a100", "--slurm", "exclusive", "--worker-slurm", "qos=low"]
    setup = ["--setup", "module load python"]
    options = [*trainer, *workers, *further, *setup, "--run-folder", folder]
    assert main(dry(*options, SCRIPT, "--batches", 5, "--wait")) == 0
    out, err = capsys.readouterr()
    assert err == f"--wait stands after {SCRIPT}, so the script gets it\n"
    first, second = out.split("# workers: 8 task(s), 8 times")
    assert re.search(r"\n# .*python.* -u .*train_submitted.py --batches 5 --wait\n", first)
    for line in (
        *("nodes=1", "ntasks-per-node=1", "cpus-per-task=8", "gpus-per-node=1", "time=2160"),
        *("partition=gpu", "constraint=a100", "exclusive", "requeue", "no-kill"),
        "signal=USR2@120",
    ):
        assert f"#SBATCH --{line}\n" in first
    for line in ("array=0-7%8", "ntasks-per-node=8", "cpus-per-task=2", "partition=gpu", "qos=low"):
        assert f"#SBATCH --{line}\n" in second
    assert "gpus" not in second
    assert "constraint" not in second
    for text in (first, second):
        assert "\nmodule load python\n" in text
        assert re.search(r"\nsrun .*--kill-on-bad-exit=0 --wait=0 --no-kill ", text)
        assert str(folder / "logs") in text
    assert not folder.exists()


def test_a_submitit_without_a_private_part_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr("submitit.slurm.slurm._make_sbatch_string")
    assert main(dry("--run-folder", tmp_path / "run", SCRIPT)) == 2
    complaint = r"submitit [\d.]+ lacks _make_sbatch_string, .* use submitit 1\.5\.4, .*--no-check"
    assert re.search(complaint, capsys.readouterr().err)


def test_no_slurm_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    folder = tmp_path / "run"
    command = ["submit", "--trust-folder", "--run-folder", str(folder), str(SCRIPT)]
    assert main(command) == 2
    said = capsys.readouterr().err
    assert "this machine has no SLURM: sbatch, srun, sinfo, scontrol can't be found" in said
    assert "torchrun" in said
    assert not folder.exists()


@pytest.mark.parametrize("where", ["/tmp/run", "/dev/shm/run"])
def test_a_folder_that_others_can_t_see(where: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "--run-folder", where, str(SCRIPT)]) == 2
    said = capsys.readouterr().err
    assert f"{where} is in {Path(where).parent}, of which each host has its own" in said
    assert "--trust-folder" in said
    assert not Path(where).exists()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["-p", "y", "--slurm", "partition=x"], "submit says partition=y: use that one"),
        (["--slurm", "cpus-per-task=3"], "submit says cpus-per-task=1: use that one"),
        (
            ["--slurm", "array=0-3"],
            "--slurm array=0-3: all jobs of the array would train in one run",
        ),
        (["--slurm", "a=0-3"], "Submit the script once for each"),
        (["--mem", 8], "unrecognized arguments: --mem"),  # sbatch's, in other units than --mem-gb
        (["--lr", 3], "unrecognized arguments: --lr; the options of a script stand after its name"),
    ],
)
def test_options_that_a_job_can_t_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[object], complaint: str
) -> None:
    assert status_of(shlex.join(dry("--run-folder", tmp_path / "run", *options, SCRIPT))) == 2
    assert complaint in capsys.readouterr().err


def test_a_dry_run_says_what_the_real_one_would(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", "--dry-run", "--run-folder", "/tmp/run", str(SCRIPT)]) == 2
    assert main(dry("--run-folder", tmp_path / "run", SCRIPT)) == 0
    assert "only workers are those that it starts itself" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "expected"),
    [("90", 90), ("30:01", 31), ("12:00:00", 720), ("2-00", 2880), ("1-01:30", 1530), ("0:59", 1)],
)
def test_times(text: str, expected: int) -> None:
    assert minutes(text) == expected
    with pytest.raises(argparse.ArgumentTypeError):
        minutes(f"{text}x")


def test_the_report_says_in_words_what_the_trainer_does(run: RunFolder) -> None:
    def said(is_running: bool) -> str:
        said = run.read("trainer.json")
        assert said is not None
        return status.trainer_in_words(said, is_running).replace(said["since"], "NOON")

    run.tell(LISTENING, host="10.0.0.1", port=12345)
    listening = "the trainer has been listening since NOON, at 10.0.0.1:12345"
    assert said(is_running=True) == listening
    assert said(is_running=False).startswith(f"{listening}; but its job isn't running")
    run.tell(REQUEUED)
    assert said(is_running=False) == "the trainer has been requeued since NOON"
    run.tell(ENDED, why="it is done")
    assert said(is_running=False) == "the trainer ended at NOON: it is done"


def test_the_folder_tells_where_the_trainer_is(run: RunFolder) -> None:
    assert stat.S_IMODE(run.token_file.stat().st_mode) == 0o600
    assert stat.S_IMODE(run.path.stat().st_mode) == 0o700
    with pytest.raises(NotYet, match="not started"):
        run.address()
    run.tell(LISTENING, host="10.0.0.1", port=12345)
    assert run.address() == ("10.0.0.1", 12345)
    run.tell(REQUEUED)
    with pytest.raises(NotYet, match="is requeued, since 20"):
        run.address()
    run.tell(ENDED, why="it is done")
    with pytest.raises(RunOver, match="it is done"):
        run.address()
    with pytest.raises(FileExistsError):
        run.create({})


@pytest.mark.parametrize("mode", [0o770, 0o777, 0o1777])
@pytest.mark.parametrize("part", ["", "jobs"])
def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path, mode: int, part: str) -> None:
    folder = tmp_path / "run"
    (folder / part).mkdir(parents=True)
    (folder / part).chmod(mode)
    with pytest.raises(PermissionError, match=r"others may write to it.*chmod go-w"):
        RunFolder(folder).create({})
    (folder / part).chmod(0o700)
    (folder / "token").unlink(missing_ok=True)
    RunFolder(folder).create({})


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user")
@pytest.mark.parametrize("linked", [False, True])
def test_a_folder_of_another_user_is_refused(tmp_path: Path, linked: bool) -> None:
    folder = theirs = tmp_path / "theirs"
    theirs.mkdir()
    os.chown(theirs, 65534, 65534)
    if linked:
        folder = tmp_path / "link"
        folder.symlink_to(theirs)
    with pytest.raises(PermissionError, match="belongs to user 65534"):
        RunFolder(folder).create({})
    assert not (theirs / "token").exists()


def test_submit_refuses_such_a_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(dc.ArgumentError, match=r"run-folder .*others may write to it \(drwxrwxrwx"):
        check_folder(tmp_path, trusted=True)
