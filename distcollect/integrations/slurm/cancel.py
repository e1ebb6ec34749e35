"""``distcollect cancel``: cancels all jobs of runs on a SLURM cluster."""

from __future__ import annotations

import argparse

from distcollect.errors import LaunchError
from distcollect.integrations.slurm.jobs import COMMAND_TIMEOUT_S, check_slurm
from distcollect.integrations.slurm.status import add_run_folders, run_in
from distcollect.integrations.slurm.task import run_command
from distcollect.launch.run_folder import ENDED


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_run_folders(parser)


def run(given: argparse.Namespace) -> int:
    """Cancel the jobs.

    Raises:
        ArgumentError: a folder holds no run; nothing was cancelled.
        LaunchError: SLURM refused, or didn't answer.
    """
    folders = [run_in(path) for path in given.run_folder]
    check_slurm()
    refused = []
    for folder in folders:
        ids = [str(job["id"]) for job in folder.jobs()]
        done = run_command(["scancel", *ids], COMMAND_TIMEOUT_S)
        if done.returncode:
            refused.append(f"SLURM refused 'scancel {' '.join(ids)}': {done.stderr.strip()}")
            continue
        folder.tell(ENDED, why="it was cancelled")
        print(f"cancelled: job(s) {', '.join(ids)}")
    if refused:
        again = "Try again when its controller is up; 'squeue --me' shows which jobs go on"
        raise LaunchError("\n".join([*refused, again]))
    return 0
