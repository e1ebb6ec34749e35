"""``distcollect cancel``: cancels all jobs of a run on a SLURM cluster."""

from __future__ import annotations

import argparse
from pathlib import Path

from distcollect.errors import LaunchError
from distcollect.integrations.slurm.jobs import COMMAND_TIMEOUT_S, check_slurm
from distcollect.integrations.slurm.status import run_in
from distcollect.integrations.slurm.task import run_command
from distcollect.launch.run_folder import ENDED


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    about = "the run folder that 'distcollect submit' printed"
    parser.add_argument("run_folder", metavar="RUN", type=Path, help=about)


def run(given: argparse.Namespace) -> int:
    """Cancel the jobs.

    Raises:
        ArgumentError: the folder holds no run.
        LaunchError: SLURM refused, or didn't answer.
    """
    folder = run_in(given.run_folder)
    check_slurm()
    ids = [str(job["id"]) for job in folder.jobs()]
    done = run_command(["scancel", *ids], COMMAND_TIMEOUT_S)
    if done.returncode:
        raise LaunchError(
            f"SLURM refused 'scancel {' '.join(ids)}': {done.stderr.strip()}\n"
            "Try again when its controller is up; 'squeue --me' shows which jobs go on"
        )
    folder.tell(ENDED, why="it was cancelled")
    print(f"cancelled: job(s) {', '.join(ids)}")
    return 0
