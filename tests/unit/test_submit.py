"""``distcollect submit``: its arguments, its files, and how it reads SLURM's answers."""

from __future__ import annotations

import argparse
import grp
import os
import pwd
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
from distcollect.launch.run_folder import (
    ENDED,
    LISTENING,
    REQUEUED,
    RUN_VARIABLE,
    NotYet,
    RunFolder,
    RunOver,
    others_may_change,
    trusted_with,
)

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


EVERYONE = r"everyone may write to .*/team, so others could .*chmod \+t .*/team"
SOMEONE = "65534 may change .*/team, and so put another folder in its place"


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another group")
@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize(
    ("mode", "owner", "error", "warning"),
    [
        (0o777, 0, EVERYONE, ""),
        (0o757, 65534, EVERYONE, ""),
        (0o775, 0, "", f"group {SOMEONE}"),
        (0o755, 65534, "", f"user {SOMEONE}"),
        (0o1777, 0, "", ""),
        (0o1775, 0, "", ""),
    ],
)
def test_who_may_write_to_a_folder_above(
    tmp_path: Path, mode: int, owner: int, error: str, warning: str, *, linked: bool
) -> None:
    """They could rename the run's folder, and put one of their own there."""
    team = tmp_path / "team"
    (team / "runs").mkdir(parents=True)
    folder = team / "runs" / "run"
    if linked:
        folder = tmp_path / "link" / "run"
        folder.parent.symlink_to(team / "runs")
    RunFolder(folder).create({})
    os.chown(team, owner, 65534)
    team.chmod(mode)
    for path in (folder, folder.with_name("new")):
        assert re.fullmatch(f".*{error}.*" if error else "", others_may_change(path))
        if not error:
            assert re.fullmatch(f".*{warning}.*" if warning else "", trusted_with(path))


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another group")
def test_a_group_of_the_user_alone_may_write_above(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many systems make one for each user, and a umask by which it may write."""
    by_name = {each.gr_name: each for each in grp.getgrall() if not each.gr_mem}
    user = next(each for each in pwd.getpwall() if each.pw_uid and each.pw_name in by_name)
    os.chown(tmp_path, user.pw_uid, by_name[user.pw_name].gr_gid)
    tmp_path.chmod(0o775)
    monkeypatch.setattr(os, "geteuid", lambda: user.pw_uid)
    assert trusted_with(tmp_path / "run") == ""
    os.chown(tmp_path, user.pw_uid, 65534)
    assert "group 65534 may change" in trusted_with(tmp_path / "run")


def test_who_reads_a_run_that_others_could_replace(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its run.json says where modules are imported from, and its token whom to trust."""
    run.write("jobs/7.json", {"id": 7, "trains": True, "submitted": 0})
    run.tell(ENDED, why="it is done")
    monkeypatch.setenv(RUN_VARIABLE, str(run.path))
    assert RunFolder.here() == run
    run.path.parent.chmod(0o777)
    with pytest.raises(PermissionError, match=f"^{RUN_VARIABLE}: .* everyone may write to"):
        RunFolder.here()
    for typed in (
        f"worker --run {run.path}",
        f"submit --add-workers {run.path} --worker-jobs 1",
        f"submit --trust-folder --run-folder {run.path}2 {SCRIPT}",
    ):
        assert status_of(typed) == 2
        assert "everyone may write to" in capsys.readouterr().err


@pytest.mark.parametrize("umask", [0o002, 0o022])
def test_folders_that_are_made_above_a_run_keep_it_its_owner_s(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        RunFolder(tmp_path / "runs" / "of" / "run").create({})
    finally:
        os.umask(before)
    for path in (tmp_path / "runs", tmp_path / "runs" / "of"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o1777 & ~umask


def test_submit_refuses_such_a_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(dc.ArgumentError, match=r"run-folder .*others may write to it \(drwxrwxrwx"):
        check_folder(tmp_path, trusted=True)
