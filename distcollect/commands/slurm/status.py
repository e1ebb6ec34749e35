"""``distcollect status``: what becomes of a run on a SLURM cluster."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from distcollect.commands.slurm import states
from distcollect.commands.slurm.jobs import check_slurm
from distcollect.commands.slurm.states import JobState
from distcollect.errors import ArgumentError
from distcollect.launch.run_folder import LISTENING, RunFolder

_POLL_S = 3.0
# A job whose node failed, or that was preempted, may be on its way back to the queue.
_SETTLE_S = 15.0
_MAY_COME_BACK = {"NODE_FAIL", "PREEMPTED", "FAILED", "CANCELLED", states.UNKNOWN}
_TAIL_LINES = 15
_MOST_TAILS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What can be typed after ``distcollect status``."""
    parser.add_argument("run_folder", type=Path, help="as 'distcollect submit' printed it")
    parser.add_argument("--wait", action="store_true", help="stay until the trainer is done")


def run(given: argparse.Namespace) -> int:
    """Tell; 1 if the trainer has failed.

    Raises:
        ArgumentError: there is no run.
        LaunchError: there is no SLURM.
    """
    folder = run_in(given.run_folder)
    check_slurm()
    if given.wait:
        return follow(folder)
    report = Report(folder)
    print(report.text)
    return report.exit_code


def run_in(path: Path) -> RunFolder:
    """A run that was submitted.

    Raises:
        ArgumentError: there is none in this folder.
    """
    folder = submitted(path)
    if not folder.jobs():
        raise ArgumentError(
            f"{path}: none of the run's jobs was submitted, as 'distcollect submit' will have "
            "said; submit it again, to another folder"
        )
    return folder


def submitted(path: Path) -> RunFolder:
    """A run's folder.

    Raises:
        ArgumentError: it is none.
    """
    folder = RunFolder(path.absolute())
    if not folder.settings:
        raise ArgumentError(
            f"{path} holds no run: no run.json of 'distcollect submit' is there. Name the folder "
            "that it printed, as in runs/train-20261122-101500"
        )
    return folder


class Report:
    """A look at a run.

    Attributes:
        trainer: the state of the trainer's job.
    """

    def __init__(self, folder: RunFolder) -> None:
        """Ask SLURM, and look into the folder."""
        self._folder = folder
        self._said = folder.read("trainer.json") or {}
        self._jobs = [(job, states.query([str(job["id"])])) for job in folder.jobs()]
        trainers = [found for job, found in self._jobs if job["trains"]]
        self.trainer: JobState = trainers[0][0]

    @property
    def exit_code(self) -> int:
        """1 if the trainer has ended, but not well."""
        return int(self.trainer.is_over and self.trainer.state != "COMPLETED")

    @property
    def key(self) -> tuple[object, ...]:
        """What a change of is news."""
        told = [(s.job_id, s.state, s.restarts) for _, found in self._jobs for s in found]
        return (*told, self._said.get("state"), self._said.get("since"))

    @property
    def text(self) -> str:
        """All of it, for people."""
        lines = [f"run {self._folder.path}"]
        for job, found in self._jobs:
            for state in found:
                kind = "trainer" if job["trains"] else "workers"
                row = f"  {kind}  {state.job_id:<12} {state.state:<13} {state.run_time:<11}"
                lines.append(f"{row} {state.nodes:<12} {state.meaning}".rstrip())
        if self._said:
            lines.append(f"the trainer {self._trainer_says()}")
        restarted = [s.job_id for _, found in self._jobs for s in found if s.restarts]
        lines += [f"an earlier life of job {life}" for life in states.lives(restarted)]
        lines += self._folder.history()
        return "\n".join([*lines, *self._failures()])

    def _trainer_says(self) -> str:
        said = self._said
        words = f"is {said['state']} since {said['since']}"
        if said["state"] == LISTENING:
            words += f", at {said['host']}:{said['port']}"
            if self.trainer.state != "RUNNING":
                words += "; but its job isn't running: that address is stale"
        return words + (f": {said['why']}" if "why" in said else "")

    def _failures(self) -> list[str]:
        """The ends of the logs of those that failed."""
        lines: list[str] = []
        failed = sorted((self._folder.path / "failed").glob("*.json"))
        names = [file.stem for file in failed]
        bad = ("FAILED", "OUT_OF_MEMORY", "TIMEOUT", "NODE_FAIL")
        for _, found in self._jobs:
            # Those that had no time to say it.
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
    """The last lines of a log, or why there are none."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return ["  (there is no such file: does the node see this folder?)"]
    return [f"  {line}" for line in lines[-_TAIL_LINES:]] or ["  (empty)"]


def follow(folder: RunFolder) -> int:
    """Tell what happens until the trainer is done; 1 if it failed."""
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
