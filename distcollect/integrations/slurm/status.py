"""``distcollect status``: the jobs of a run on a SLURM cluster, and their states."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distcollect.errors import ArgumentError
from distcollect.integrations.slurm import states
from distcollect.integrations.slurm.jobs import check_slurm
from distcollect.integrations.slurm.states import JobState
from distcollect.launch.run_folder import ENDED, LISTENING, RunFolder

_POLL_S = 3.0
# A job whose host failed, or that was preempted, may soon be back in the queue.
_SETTLE_S = 15.0
_MAY_COME_BACK = {"NODE_FAIL", "PREEMPTED", "FAILED", "CANCELLED", states.UNKNOWN}
_TAIL_LINES = 15
_MOST_TAILS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "run_folder",
        nargs="+",
        type=Path,
        help="the run folder that 'distcollect submit' printed; or several, as in runs/train-*",
    )
    parser.add_argument(
        "--wait", action="store_true", help="show changes until the trainer has ended"
    )


def run(given: argparse.Namespace) -> int:
    """Print the states of runs; 1 if a trainer failed.

    Raises:
        ArgumentError: a folder holds no run.
        LaunchError: there is no SLURM here.
    """
    folders = [run_in(path) for path in given.run_folder]
    check_slurm()
    if given.wait:
        return max(map(follow, folders))
    reports = list(map(Report, folders))
    print("\n\n".join(report.text for report in reports))
    return max(report.exit_code for report in reports)


def run_in(path: Path) -> RunFolder:
    """The folder of a run with submitted jobs.

    Raises:
        ArgumentError: the folder holds no run, or none of the run's jobs was submitted.
    """
    folder = submitted(path)
    if not folder.jobs():
        raise ArgumentError(
            f"{path}: none of the run's jobs was submitted ('distcollect submit' printed the "
            "reason); submit it again, to another folder"
        )
    return folder


def submitted(path: Path) -> RunFolder:
    """The folder of a run.

    Raises:
        ArgumentError: the folder holds no run.
    """
    folder = RunFolder(path.absolute())
    if not folder.settings:
        raise ArgumentError(
            f"{path} holds no run: no run.json of 'distcollect submit' is there. Name the folder "
            "that it printed, as in runs/train-20261122-101500"
        )
    return folder


def trainer_in_words(said: Mapping[str, Any], is_running: bool) -> str:
    """What ``trainer.json`` says, as a line of the report.

    Args:
        said: the content of that file.
        is_running: whether the trainer's job is running.
    """
    if said["state"] == ENDED:
        words = f"the trainer ended at {said['since']}"
    else:
        words = f"the trainer has been {said['state']} since {said['since']}"
    if said["state"] == LISTENING:
        words += f", at {said['host']}:{said['port']}"
        if not is_running:
            words += "; but its job isn't running: that address is stale"
    return words + (f": {said['why']}" if "why" in said else "")


class Report:
    """The state of a run at one moment.

    Attributes:
        trainer: the state of the trainer's job.
    """

    def __init__(self, folder: RunFolder) -> None:
        """Ask SLURM, and read the run's folder."""
        self._folder = folder
        self._said = folder.read("trainer.json") or {}
        self._jobs = [(job, states.query([str(job["id"])])) for job in folder.jobs()]
        trainers = [found for job, found in self._jobs if job["trains"]]
        self.trainer: JobState = trainers[0][0]

    @property
    def exit_code(self) -> int:
        """1 if the trainer has failed, otherwise 0."""
        return int(self.trainer.is_over and self.trainer.state != "COMPLETED")

    @property
    def key(self) -> tuple[object, ...]:
        """A value that changes whenever the report should be printed again."""
        jobs = [(s.job_id, s.state, s.restarts) for _, found in self._jobs for s in found]
        return (*jobs, self._said.get("state"), self._said.get("since"))

    @property
    def text(self) -> str:
        """The report in words."""
        lines = [f"run {self._folder.path}"]
        for job, found in self._jobs:
            for state in found:
                kind = "trainer" if job["trains"] else "workers"
                row = f"  {kind}  {state.job_id:<12} {state.state:<13} {state.run_time:<11}"
                lines.append(f"{row} {state.nodes:<12} {state.meaning}".rstrip())
        if self._said:
            lines.append(trainer_in_words(self._said, self.trainer.state == "RUNNING"))
        restarted = [s.job_id for _, found in self._jobs for s in found if s.restarts]
        lines += [f"an earlier start of job {start}" for start in states.earlier_starts(restarted)]
        lines += self._folder.history()
        return "\n".join([*lines, *self._failures()])

    def _failures(self) -> list[str]:
        """The last lines of the logs of tasks that failed."""
        lines: list[str] = []
        failed = sorted((self._folder.path / "failed").glob("*.json"))
        names = [file.stem for file in failed]
        bad = ("FAILED", "OUT_OF_MEMORY", "TIMEOUT", "NODE_FAIL")
        for _, found in self._jobs:
            # Tasks that had no time to write a file about their failure.
            names += [f"{s.job_id}_0" for s in found if s.state in bad]
        for name in list(dict.fromkeys(names))[:_MOST_TAILS]:
            about = self._folder.read(f"failed/{name}.json") or {}
            job_id, _, rank = name.rpartition("_")
            log = self._folder.logs / f"{name}_log.err"
            how = f", {about['how']} on {about['host']}" if about else ""
            lines.append(f"\njob {job_id}, task {rank}{how}; the last lines of {log}:")
            lines += tail(log)
        if len(set(names)) > _MOST_TAILS:
            lines.append(f"\nand {len(set(names)) - _MOST_TAILS} more, see {self._folder.logs}")
        return lines


def tail(log: Path) -> list[str]:
    """The last lines of a log, or a line that says why there are none."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return ["  (there is no such file: does that host see this folder?)"]
    return [f"  {line}" for line in lines[-_TAIL_LINES:]] or ["  (empty)"]


def follow(folder: RunFolder) -> int:
    """Print every change until the trainer has ended; 1 if it failed."""
    key: tuple[object, ...] = ()
    over_since: float | None = None
    while True:
        report = Report(folder)
        if report.key != key:
            print(report.text, end="\n\n", flush=True)
            key = report.key
        ended = report.trainer.is_over or report.trainer.state == states.UNKNOWN
        now = time.monotonic()
        over_since = (over_since or now) if ended else None
        settle_s = _SETTLE_S if report.trainer.state in _MAY_COME_BACK else 0.0
        if over_since is not None and now - over_since >= settle_s:
            sys.stdout.flush()
            return report.exit_code
        time.sleep(_POLL_S)
