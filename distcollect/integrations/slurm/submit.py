"""``distcollect submit``: submits a training script to a SLURM cluster."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from distcollect.commands.argtypes import above_0, count, declare, natural
from distcollect.errors import ArgumentError, LaunchError
from distcollect.integrations.slurm import status
from distcollect.integrations.slurm.jobs import COMMAND_TIMEOUT_S, Job, check_slurm
from distcollect.integrations.slurm.task import run_command
from distcollect.launch.run_folder import (
    ENDED,
    RunFolder,
    obstacle,
    others_may_change,
    trusted_with,
)

_PRIVATE_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm", "/run")  # noqa: S108 - only compared with
# What a job requests whose names are submitit's.
_UNDER_THEIR_NAMES = ("nodes", "cpus_per_task", "time", "partition", "account", "qos", "setup")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.usage = "distcollect submit [OPTIONS] SCRIPT [ARGUMENTS OF THE SCRIPT ...]"
    parser.add_argument("script", nargs="?", type=Path, help="the training script, a Python file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="passed on to the script")
    add = partial(declare, parser.add_argument)
    add("--run-folder DIR", "for the run's files, on a disk that all hosts share (default: "
        "runs/SCRIPT-TIME in the working folder)", type=Path)  # fmt: skip
    add("--add-workers RUN", "add worker jobs to the run in this folder, instead of submitting a "
        "script", type=Path)  # fmt: skip
    add("--resume RUN", "continue from the checkpoint.pt in the folder of this run, which has "
        "ended", type=Path)  # fmt: skip
    add("--name NAME", "of the jobs in SLURM's queue (default: the script's)")

    job = parser.add_argument_group("the trainer's job")
    add = partial(declare, job.add_argument)
    add("--nodes N", "hosts", type=count, default=1)
    add("--tasks-per-node N", "the first of all tasks is the trainer, the others are workers",
        type=count, default=1)  # fmt: skip
    add("--cpus-per-task N", "cores", type=count, default=1)
    add("--gpus-per-node N", "GPUs", type=natural, default=0)
    add("--mem-gb GB", "memory of each node (default: the cluster's)", type=above_0)
    add("--time TIME", "time limit, after which the job is requeued: 90 (minutes), 12:00:00 or "
        "2-00:00:00", type=minutes, default=60)  # fmt: skip
    job.add_argument("--partition", "-p", metavar="NAME", help="partition (default: the cluster's)")
    job.add_argument("--account", "-A", metavar="NAME", help="the account that is charged")
    add("--qos NAME", "quality of service")
    add("--slurm NAME[=VALUE]", "any other option of sbatch, such as constraint=a100 or exclusive",
        action="append")  # fmt: skip
    add("--setup LINE", "shell command to run first, such as 'module load cuda'", action="append")

    workers = parser.add_argument_group("separate jobs for workers, which by default are as above")
    add = partial(declare, workers.add_argument)
    add("--worker-jobs N", "jobs, of one node each", type=natural, default=0)
    add("--worker-tasks N", "workers in each", type=count, default=1, dest="worker_tasks_per_node")
    add("--worker-cpus N", "cores of each worker", type=count, dest="worker_cpus_per_task")
    add("--worker-gpus N", "GPUs of each job", type=natural, default=0, dest="worker_gpus_per_node")
    add("--worker-mem-gb GB", "memory of each job", type=above_0)
    add("--worker-time TIME", "time limit of each job", type=minutes)
    add("--worker-partition NAME", "partition of these jobs, for example one without GPUs")
    add("--worker-slurm NAME[=VALUE]", "used instead of --slurm", action="append")

    add = partial(declare, parser.add_argument_group("how to run and submit").add_argument)
    add("--patience SECONDS", "how long workers wait for a trainer that is queued or requeued, and "
        "the trainer for workers", type=above_0, default=3600.0)  # fmt: skip
    add("--notice SECONDS", "how long before its time limit a job gets the signal to save",
        type=count, default=120)  # fmt: skip
    add("--max-time-limits N", "how often a job is requeued at its time limit", type=natural,
        default=100)  # fmt: skip
    for name, about in {
        "--dry-run": "print the sbatch files, submit nothing",
        "--wait": "stay until the trainer has ended, and print what happens; the exit code is 1 if "
        "it failed",
        "--trust-folder": "accept a run folder that doesn't look like it is on a shared disk",
        "--no-check": "don't ask SLURM first whether the jobs could ever run",
    }.items():
        add(name, about, action="store_true")


def run(given: argparse.Namespace) -> int:
    """Submit the script, or more worker jobs.

    Raises:
        ArgumentError: the arguments can't work. Nothing was submitted.
        LaunchError: there is no SLURM here, or it refused the jobs.
    """
    if given.add_workers is not None:
        return _add_workers(given)
    if given.script is None:
        raise ArgumentError("no script given: call 'distcollect submit [OPTIONS] train.py'")
    for text in given.arguments:
        if text.startswith("--") and text[2:].partition("=")[0].replace("-", "_") in vars(given):
            print(f"{text} stands after {given.script}, so the script gets it", file=sys.stderr)
    script = given.script.absolute()
    if not script.is_file():
        raise ArgumentError(
            f"{given.script} is not a file: name the training script, as seen from {Path.cwd()}"
        )
    name = given.name or script.stem
    # Several may be submitted in one second.
    default = Path("runs", f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
    folder = RunFolder((given.run_folder or default).absolute())
    shortest = min(given.time, given.worker_time or given.time)
    if given.notice >= 60 * shortest:
        raise ArgumentError(
            f"--notice {given.notice} s is all of the {shortest} minute(s) that a job has: it "
            "would be told to end when it begins; ask for more --time, or a shorter --notice"
        )
    command = [sys.executable, "-u", str(script), *given.arguments]
    saved = [] if given.resume is None else _saved(given.resume)
    settings = {
        "name": name,
        "command": command,
        "script_folder": str(script.parent),
        "cwd": str(Path.cwd()),
        "num_tasks": given.nodes * given.tasks_per_node,
        "num_workers": given.worker_jobs * given.worker_tasks_per_node,
        "patience_s": given.patience,
        "notice_s": given.notice,
        "max_time_limits": given.max_time_limits,
        "submitted": time.strftime("%Y-%m-%d %H:%M:%S"),
    }
    jobs = [_job(given, folder, settings, command, trains=True)]
    if given.worker_jobs:
        jobs.append(_worker_job(given, folder, settings))
    check_folder(folder.path, trusted=given.trust_folder)
    if settings["num_tasks"] == 1 and not given.worker_jobs:
        print("the script's only workers are those that it starts itself, as by num_workers=4: for "
            "others, add --tasks-per-node N or --worker-jobs N", file=sys.stderr)  # fmt: skip
    return _submit(given, jobs, saved)


def _saved(earlier: Path) -> list[Path]:
    """Return the files with which a run continues, of an earlier run."""
    folder = RunFolder(earlier)
    saved = folder.path / "checkpoint.pt"
    if not saved.is_file():
        raise ArgumentError(
            f"--resume {earlier}: there is no {saved.name}, which Checkpoint(...) writes to the "
            "run folder if it is given no path; with a path of its own, leave --resume out"
        )
    if (folder.read("trainer.json") or {}).get("state", ENDED) != ENDED:
        raise ArgumentError(
            f"--resume {earlier}: its trainer has not said that it ended: 'distcollect status "
            f"{earlier}' shows its job, 'distcollect cancel {earlier}' ends it"
        )
    return [saved, *folder.path.glob("checkpoint-best.pt")]


def _add_workers(given: argparse.Namespace) -> int:
    if given.script is not None:
        raise ArgumentError(
            f"--add-workers takes no script, since the run has one: leave out {given.script}"
        )
    if not given.worker_jobs:
        raise ArgumentError("--add-workers needs --worker-jobs N: how many jobs?")
    folder = status.run_in(given.add_workers)
    _check_owners("--add-workers", folder.path)
    settings = folder.settings
    said = folder.read("trainer.json") or {}
    if said.get("state") == ENDED:
        raise ArgumentError(
            f"the run in {folder.path} is over: {said.get('why')}. Submit its script again; "
            f"--resume {folder.path} goes on from what its Checkpoint saved"
        )
    if not settings["num_workers"] and settings["num_tasks"] == 1:
        raise ArgumentError(
            f"the run in {folder.path} was submitted as one task that starts its own workers: "
            "no other worker can join it. Submit its script again, with --worker-jobs"
        )
    return _submit(given, [_worker_job(given, folder, settings)])


def check_folder(path: Path, *, trusted: bool) -> None:
    """Raise ArgumentError if the jobs of a run could not meet in a folder, or not safely."""
    folder = RunFolder(path)
    if folder.settings or folder.token_file.exists():
        raise ArgumentError(
            f"{path} holds a run already: name another --run-folder. A run that was "
            "interrupted continues by itself; see 'distcollect status'"
        )
    if problem := obstacle(path):
        raise ArgumentError(f"{problem}: name another --run-folder")
    _check_owners("--run-folder", path)
    private = [each for each in _PRIVATE_FOLDERS if path.is_relative_to(each)]
    if private and not trusted:
        raise ArgumentError(
            f"{path} is in {private[0]}, of which each host has its own: the jobs could not find "
            "each other there. Name a --run-folder on the cluster's shared disk, or add "
            "--trust-folder if all hosts do see it"
        )


def _check_owners(option: str, path: Path) -> None:
    if problem := others_may_change(path):
        raise ArgumentError(f"{option} {problem}")
    if doubt := trusted_with(path):
        print(f"{option} {doubt}", file=sys.stderr)


def _submit(given: argparse.Namespace, jobs: list[Job], saved: Sequence[Path] = ()) -> int:
    """Submit the jobs of a run that is new, or has others, or show them.

    A new run continues with the files ``saved``.
    """
    if given.dry_run:
        for job in jobs:
            who, times = job.about
            print(f"# {who}: {job.num_tasks} task(s){times}\n# {shlex.join(job.command)}")
            print(job.sbatch_file)
        return 0
    check_slurm()
    for job in () if given.no_check else jobs:
        if problem := job.test():
            lines = job.sbatch_file.splitlines()
            requested = "\n".join(f"  {line}" for line in lines if line.startswith("#SBATCH"))
            raise LaunchError(
                f"SLURM would not run the {job.about[0]}: {problem}\n"
                f"requested:\n{requested}\n{_what_to_do()}"
            )
    folder = jobs[0].folder
    if given.add_workers is None:
        folder.create(dict(jobs[0].settings))
    for file in saved:
        shutil.copy2(file, folder.path)
    for job in jobs:
        who, times = job.about
        print(f"{who}: job {job.submit()}{times}", flush=True)
    path = folder.path
    print(
        f"run folder: {path}\n  distcollect status {path}\n  distcollect cancel {path}", flush=True
    )
    return status.follow(folder) if given.wait else 0


def _what_to_do() -> str:
    """What to do where SLURM refuses a job."""
    asked = run_command(["sinfo"], COMMAND_TIMEOUT_S)
    if asked.returncode == 0:
        return "'sinfo' shows what the cluster has; --no-check submits anyway"
    return (
        f"'sinfo' finds no cluster either: {asked.stderr.strip()}\nLog in to the cluster's login "
        "node, or try again once its controller answers"
    )


def _worker_job(given: argparse.Namespace, folder: RunFolder, settings: Mapping[str, Any]) -> Job:
    """Return the jobs of workers: what is not given for them is as in the trainer's job."""
    own = {name: getattr(given, f"worker_{name}", None) for name in vars(given)}
    own = {"nodes": 1} | {name: value for name, value in own.items() if value is not None}
    wanted = argparse.Namespace(**vars(given) | own)
    command = [sys.executable, "-m", "distcollect", "worker", "--run", str(folder.path)]
    command += ["--threads", str(wanted.cpus_per_task)]
    return _job(wanted, folder, settings, command, trains=False)


def _job(
    wanted: argparse.Namespace,
    folder: RunFolder,
    settings: Mapping[str, Any],
    command: list[str],
    *,
    trains: bool,
) -> Job:
    parameters = {
        "job_name": settings["name"] if trains else f"{settings['name']}-workers",
        "ntasks_per_node": wanted.tasks_per_node,
        "gpus_per_node": wanted.gpus_per_node or None,
        "mem": wanted.mem_gb and f"{round(wanted.mem_gb * 1024)}MB",
        "signal_delay_s": settings["notice_s"],
        # From SLURM 22.05 on, srun doesn't inherit sbatch's number of CPUs.
        "srun_args": [
            *("--kill-on-bad-exit=0", "--wait=0", "--no-kill", "--open-mode=append"),
            f"--cpus-per-task={wanted.cpus_per_task}",
        ],
        "wckey": None,
    }
    parameters |= {name: getattr(wanted, name) for name in _UNDER_THEIR_NAMES}
    # A host or a task that fails must not end the others.
    options: dict[str, str | bool] = {"requeue": True, "no-kill": True}
    for given in wanted.slurm or ():
        option, _, value = given.partition("=")
        if not (name := option.lstrip("-")):
            raise ArgumentError(
                f"--slurm {given!r}: must be NAME or NAME=VALUE, an option of sbatch"
            )
        if name in ("array", "a"):
            raise ArgumentError(
                f"--slurm {given}: all jobs of the array would train in one run folder. Submit the "
                "script once for each; --worker-jobs N makes an array of workers"
            )
        if (own := parameters.get(name.replace("-", "_"))) is not None:
            raise ArgumentError(
                f"--slurm {given}: an option of distcollect submit says {name}={own}: use that one"
            )
        options[name] = value or True
    parameters["additional_parameters"] = options
    count = 1 if trains else wanted.worker_jobs
    return Job(folder, settings, trains, command, parameters, count)


def minutes(text: str) -> int:
    """Parse SLURM's times, such as "90", "30:00", "2-12" or "2-12:30"; minutes, rounded up."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r}: must be like 90 (minutes), 12:00:00 or 2-00:00:00"
        )
    days, *parts = match.groups()
    numbers = [int(part) for part in parts if part is not None]
    units = (60, 1) if days is None and len(numbers) < 3 else (3600, 60, 1)
    seconds = int(days or 0) * 86_400 + sum(n * s for n, s in zip(numbers, units, strict=False))
    if seconds == 0:
        raise argparse.ArgumentTypeError(f"{text!r}: must be more than 0, such as 90 (minutes)")
    return -(-seconds // 60)
