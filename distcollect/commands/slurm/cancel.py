"""``distcollect cancel``: ends all jobs of a run on a SLURM cluster."""

from __future__ import annotations

import argparse
from pathlib import Path

from distcollect.commands.slurm.jobs import check_slurm, run_command
from distcollect.commands.slurm.status import run_in
from distcollect.errors import LaunchError
from distcollect.launch.run_folder import ENDED


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What can be typed after ``distcollect cancel``."""
    parser.add_argument("run_folder", type=Path, help="as 'distcollect submit' printed it")


def run(given: argparse.Namespace) -> int:
    """Cancel them.

    Raises:
        ArgumentError: there is no run.
        LaunchError: SLURM didn't take it.
    """
    folder = run_in(given.run_folder)
    check_slurm()
    ids = [str(job["id"]) for job in folder.jobs()]
    done = run_command(["scancel", *ids])
    if done.returncode:
        raise LaunchError(
            f"SLURM did not take 'scancel {' '.join(ids)}': {done.stderr.strip()}\n"
            "Try again when its controller is up; jobs that go on are shown by 'squeue --me'"
        )
    folder.tell(ENDED, why="it was cancelled")
    print(f"cancelled: job(s) {', '.join(ids)}")
    return 0
