"""The jobs of a run: their sbatch files, and their submission through submitit."""

from __future__ import annotations

import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import cloudpickle
import submitit
from submitit.slurm import slurm as submitit_slurm

from distcollect.common import process_exit
from distcollect.errors import LaunchError
from distcollect.integrations.slurm import task
from distcollect.integrations.slurm.task import SlurmTask, run_command
from distcollect.launch import run_folder
from distcollect.launch.run_folder import RUN_VARIABLE, TOKEN_VARIABLE, RunFolder

COMMAND_TIMEOUT_S = 60.0
# Time for a task to requeue its job, after the time that its script has to save.
_REQUEUE_S = 10.0

# A task's own process then imports neither torch nor the rest of distcollect.
for _module in (task, run_folder, process_exit):
    cloudpickle.register_pickle_by_value(_module)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One job, or an array of equal jobs, and what each of them requests from SLURM.

    Attributes:
        name: its name in SLURM's queue.
        trains: whether its first task is the trainer.
        command: the command that each task runs.
        requests: what it asks for, by submitit's names: at least "nodes", "ntasks_per_node" and
            "cpus_per_task".
        options: other options of sbatch by their long names; "" for one without a value.
        count: number of jobs; more than one make an array.
    """

    name: str
    trains: bool
    command: Sequence[str]
    requests: Mapping[str, Any]
    options: Mapping[str, str] = field(default_factory=dict)
    count: int = 1

    @property
    def num_tasks(self) -> int:
        """Number of tasks in each job."""
        return int(self.requests["nodes"] * self.requests["ntasks_per_node"])

    @property
    def about(self) -> tuple[str, str]:
        """Who runs in it, and how often it is submitted, in words: the latter after a comma."""
        times = "" if self.count == 1 else f", {self.count} times"
        return "trainer" if self.trains else "workers", times

    def __str__(self) -> str:
        wanted = {"count": self.count, **self.requests, **self.options}
        return ", ".join(f"{name}={value}" for name, value in wanted.items() if value is not None)


@dataclass(frozen=True)
class Submitter:
    """Makes sbatch files for the jobs of one run, and submits them.

    Attributes:
        folder: the run's folder.
        settings: what the run's ``run.json`` holds; of it the scripts' working folder "cwd",
            "notice_s", how many seconds before the time limit SLURM sends its signal, and
            "max_time_limits", how often a job is requeued at its time limit.
    """

    folder: RunFolder
    settings: Mapping[str, Any]

    def sbatch_file(self, job: Job) -> str:
        """The file that is given to sbatch.

        Raises:
            LaunchError: this submitit lacks a private part that is needed.
        """
        # There is no public way before a job is submitted.
        make = getattr(submitit_slurm, "_make_sbatch_string", None)
        if make is None:
            raise LaunchError(
                f"submitit {metadata.version('submitit')} lacks _make_sbatch_string, which shows "
                "an sbatch file before its job is submitted; use the submitit version that "
                "constraints/tested.txt names, or submit with --no-check"
            )
        executor = [sys.executable, "-u", "-m", "submitit.core._submit", str(self.folder.logs)]
        text: str = make(
            command=shlex.join(executor),
            folder=self.folder.logs,
            map_count=job.count if job.count > 1 else None,
            **self._parameters(job),
        )
        return text

    def test(self, job: Job) -> str:
        """Ask SLURM whether it could ever run a job; return why not, or "" if it could.

        Raises:
            LaunchError: this submitit lacks a private part that is needed.
        """
        with tempfile.NamedTemporaryFile("w", suffix=".sh") as file:
            file.write(self.sbatch_file(job))
            file.flush()
            done = run_command(["sbatch", "--test-only", file.name], COMMAND_TIMEOUT_S)
        return "" if done.returncode == 0 else done.stderr.strip()

    def submit(self, job: Job) -> str:
        """Submit a job; return its id.

        Raises:
            LaunchError: SLURM refused.
        """
        most = self.settings["max_time_limits"]
        executor = submitit.SlurmExecutor(self.folder.logs, max_num_timeout=most)
        executor.update_parameters(**self._parameters(job))
        tasks = [self.task(job) for _ in range(job.count)]
        errors = submitit.core.utils.FailedJobError, submitit.core.utils.FailedSubmissionError
        try:
            submitted = executor.submit_array(tasks)
        except errors as error:
            raise LaunchError(f"sbatch refused the job {job.name!r}: {error}") from error
        job_id = str(submitted[0].job_id).split("_")[0]
        about = {"trains": job.trains, "count": job.count, "num_tasks": job.num_tasks}
        self.folder.write(f"jobs/{job_id}.json", {"id": job_id, **about, "submitted": time.time()})
        return job_id

    def task(self, job: Job) -> SlurmTask:
        """What each task of a job runs."""
        return SlurmTask(
            list(job.command),
            str(self.folder.path),
            str(self.settings["cwd"]),
            job.trains,
            max(5.0, self.settings["notice_s"] - _REQUEUE_S),
            {
                RUN_VARIABLE: str(self.folder.path),
                TOKEN_VARIABLE: str(self.folder.token_file),
                "PYTHONUNBUFFERED": "1",
            },
        )

    def _parameters(self, job: Job) -> dict[str, Any]:
        # A host or a task that fails must not end the others.
        options: dict[str, str | bool] = {"requeue": True, "no-kill": True}
        options |= {name: value or True for name, value in job.options.items()}
        wanted = {name: value for name, value in job.requests.items() if value is not None}
        return {
            **wanted,
            "job_name": job.name,
            "signal_delay_s": self.settings["notice_s"],
            "additional_parameters": options,
            # From SLURM 22.05 on, srun doesn't inherit sbatch's number of CPUs.
            "srun_args": [
                *("--kill-on-bad-exit=0", "--wait=0", "--no-kill", "--open-mode=append"),
                f"--cpus-per-task={wanted['cpus_per_task']}",
            ],
            "wckey": None,
        }


def partitions() -> dict[str, str]:
    """Map the name of each partition to a description of its hosts.

    Raises:
        LaunchError: there is no SLURM here, or it doesn't answer.
    """
    check_slurm()
    form = "%R|%D node(s) with up to %c CPUs, %m MB of memory, %G for at most %l"
    done = run_command(["sinfo", "--noheader", "--format", form], COMMAND_TIMEOUT_S)
    if done.returncode:
        raise LaunchError(
            "SLURM doesn't answer: is this a login node, and is the cluster up? sinfo says:\n"
            f"{done.stderr.strip()}"
        )
    found: dict[str, str] = {}
    for line in done.stdout.splitlines():
        name, _, about = line.partition("|")
        about = about.replace("(null)", "no GPUs")
        found[name] = f"{found[name]}; {about}" if name in found else about
    return found


def check_slurm() -> None:
    """Raise LaunchError if SLURM's commands are not installed here."""
    missing = [name for name in ("sbatch", "srun", "sinfo", "scontrol") if not shutil.which(name)]
    if missing:
        raise LaunchError(
            f"this machine has no SLURM: {', '.join(missing)} can't be found. Log in to the "
            "cluster's login node; or start the script by torchrun, or by plain python"
        )
