"""The jobs of a run: their sbatch files, and their submission through submitit."""

from __future__ import annotations

import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from distcollect.version import TESTED

COMMAND_TIMEOUT_S = 60.0
# Time for a task to requeue its job, after the time that its script has to save.
_REQUEUE_S = 10.0

# A task's own process then imports neither torch nor the rest of distcollect.
for _module in (task, run_folder, process_exit):
    cloudpickle.register_pickle_by_value(_module)


@dataclass(frozen=True)
class Job:
    """One job of a run, or an array of equal jobs.

    Attributes:
        folder: the run's folder.
        settings: what the run's ``run.json`` holds; of it the scripts' working folder "cwd",
            "notice_s", how many seconds before the time limit SLURM sends its signal, and
            "max_time_limits", how often a job is requeued at its time limit.
        trains: whether its first task is the trainer.
        command: the command that each task runs.
        parameters: what each job requests, by submitit's names.
        count: number of jobs; more than one make an array.
    """

    folder: RunFolder
    settings: Mapping[str, Any]
    trains: bool
    command: Sequence[str]
    parameters: Mapping[str, Any]
    count: int = 1

    @property
    def num_tasks(self) -> int:
        """Number of tasks in each job."""
        return int(self.parameters["nodes"] * self.parameters["ntasks_per_node"])

    @property
    def about(self) -> tuple[str, str]:
        """Who runs in it, and how often it is submitted, in words: the latter after a comma."""
        times = "" if self.count == 1 else f", {self.count} times"
        return "trainer" if self.trains else "workers", times

    @property
    def sbatch_file(self) -> str:
        """The file that is given to sbatch.

        Raises:
            LaunchError: this submitit lacks a private part that is needed.
        """
        # There is no public way before a job is submitted.
        make = getattr(submitit_slurm, "_make_sbatch_string", None)
        if make is None:
            raise LaunchError(
                f"submitit {metadata.version('submitit')} lacks _make_sbatch_string, which shows "
                "an sbatch file before its job is submitted; use submitit "
                f"{TESTED['submitit']}, or submit with --no-check"
            )
        executor = [sys.executable, "-u", "-m", "submitit.core._submit", str(self.folder.logs)]
        text: str = make(
            command=shlex.join(executor),
            folder=self.folder.logs,
            map_count=self.count if self.count > 1 else None,
            **self.parameters,
        )
        return text

    def test(self) -> str:
        """Ask SLURM whether it could ever run this; return why not, or "" if it could.

        Raises:
            LaunchError: this submitit lacks a private part that is needed.
        """
        with tempfile.NamedTemporaryFile("w", suffix=".sh") as file:
            file.write(self.sbatch_file)
            file.flush()
            done = run_command(["sbatch", "--test-only", file.name], COMMAND_TIMEOUT_S)
        return "" if done.returncode == 0 else done.stderr.strip()

    def submit(self) -> str:
        """Submit it; return its id.

        Raises:
            LaunchError: SLURM refused.
        """
        most = self.settings["max_time_limits"]
        executor = submitit.SlurmExecutor(self.folder.logs, max_num_timeout=most)
        executor.update_parameters(**self.parameters)
        errors = submitit.core.utils.FailedJobError, submitit.core.utils.FailedSubmissionError
        try:
            submitted = executor.submit_array([self.task() for _ in range(self.count)])
        except errors as error:
            name = self.parameters["job_name"]
            raise LaunchError(f"sbatch refused the job {name!r}: {error}") from error
        job_id = str(submitted[0].job_id).split("_")[0]
        about = {"trains": self.trains, "count": self.count, "num_tasks": self.num_tasks}
        self.folder.write(f"jobs/{job_id}.json", {"id": job_id, **about, "submitted": time.time()})
        return job_id

    def task(self) -> SlurmTask:
        """What each of its tasks runs."""
        return SlurmTask(
            list(self.command),
            str(self.folder.path),
            str(self.settings["cwd"]),
            self.trains,
            max(5.0, self.settings["notice_s"] - _REQUEUE_S),
            {
                RUN_VARIABLE: str(self.folder.path),
                TOKEN_VARIABLE: str(self.folder.token_file),
                "PYTHONUNBUFFERED": "1",
            },
        )


def check_slurm() -> None:
    """Raise LaunchError if SLURM's commands are not installed here."""
    missing = [name for name in ("sbatch", "srun", "sinfo", "scontrol") if not shutil.which(name)]
    if missing:
        raise LaunchError(
            f"this machine has no SLURM: {', '.join(missing)} can't be found. Log in to the "
            "cluster's login node; or start the script by torchrun, or by plain python"
        )
