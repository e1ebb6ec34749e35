"""``distcollect status``: the jobs of a run on a SLURM cluster, and what SLURM says of them."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from distcollect.errors import ArgumentError, LaunchError
from distcollect.integrations.slurm.jobs import COMMAND_TIMEOUT_S, check_slurm
from distcollect.integrations.slurm.task import run_command
from distcollect.launch.run_folder import DONE, ENDED, LISTENING, RunFolder

_POLL_S = 3.0
# A job whose host failed, or that was preempted, may soon be back in the queue.
_SETTLE_S = 15.0
_TAIL_LINES = 15
_MOST_TAILS = 3

_SQUEUE = (
    *("squeue", "--noheader", "--array", "--states=all", "--sort=i"),
    *("--format=%i|%T|%M|%N|%r", "--jobs"),
)
GONE = "GONE"
_FAILED = {"FAILED", "OUT_OF_MEMORY", "TIMEOUT", "NODE_FAIL"}
_ENDED = _FAILED | {"COMPLETED", "CANCELLED", "PREEMPTED", "DEADLINE", "BOOT_FAIL", "REVOKED", GONE}
_HELD = "'scontrol release ID' lets it go on"
_ADVICE = {
    "TIMEOUT": "it could not be requeued in time: ask for more --time, or a longer --notice",
    "PREEMPTED": "this cluster doesn't requeue it: submit it again with --resume RUN",
    "OUT_OF_MEMORY": "ask for more --mem-gb",
    "REQUEUE_HOLD": _HELD,
    "SPECIAL_EXIT": _HELD,
    GONE: "SLURM's queue doesn't have it any more; 'sacct --duplicates --jobs ID' may",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_run_folders(parser)
    about = "show changes until the trainer has ended"
    parser.add_argument("--wait", action="store_true", help=about)


def add_run_folders(parser: argparse.ArgumentParser) -> None:
    """Declare the argument that names runs."""
    about = "the run folder that 'distcollect submit' printed; or several, as in runs/train-*"
    parser.add_argument("run_folder", metavar="RUN", nargs="+", type=Path, help=about)


def run(given: argparse.Namespace) -> int:
    """Print the states of runs; 1 if a trainer failed.

    Raises:
        ArgumentError: a folder holds no run.
        LaunchError: there is no SLURM here, or it doesn't answer.
    """
    folders = [run_in(path) for path in given.run_folder]
    check_slurm()
    if given.wait:
        return max(map(follow, folders))
    reports = list(map(Report, folders))
    print("\n\n".join(report.text for report in reports))
    return max(report.exit_code for report in reports)


def run_in(path: Path) -> RunFolder:
    """Return the folder of a run with submitted jobs.

    Raises:
        ArgumentError: the folder holds no run, or none of the run's jobs was submitted.
    """
    folder = RunFolder(path.absolute())
    if not folder.settings:
        raise ArgumentError(
            f"{path} holds no run: no run.json of 'distcollect submit' is there. Name the folder "
            "that it printed, as in runs/train-20261122-101500"
        )
    if not folder.jobs():
        raise ArgumentError(
            f"{path}: none of the run's jobs was submitted ('distcollect submit' printed the "
            "reason); submit it again, to another folder"
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


class JobState(NamedTuple):
    """The state of one job, or of one job of an array, in SLURM's words.

    Attributes:
        job_id: its id, such as "12" or "12_3".
        state: the name of the state; :data:`GONE`: the queue doesn't have the job any more.
        run_time: since it last started.
        nodes: the hosts that it runs or ran on.
        reason: why it waits, or why it failed; "None" if SLURM gives no reason.
    """

    job_id: str
    state: str
    run_time: str = ""
    nodes: str = ""
    reason: str = "None"

    def row(self, who: str) -> str:
        """The state as a line of the report."""
        why = [] if self.reason == "None" else [f"({self.reason})"]
        why += [_ADVICE[self.state]] if self.state in _ADVICE else []
        row = f"  {who}  {self.job_id:<12} {self.state:<13} {self.run_time:<11} {self.nodes:<12}"
        return " ".join([row, *why]).rstrip()


class Report:
    """The state of a run at one moment.

    Attributes:
        exit_code: 1 if the trainer has failed, otherwise 0.
        is_over: whether the trainer has ended.
        may_come_back: whether SLURM may start its job again all the same.
    """

    def __init__(self, folder: RunFolder) -> None:
        """Ask SLURM, and read the run's folder.

        Raises:
            LaunchError: SLURM doesn't answer.
        """
        self._folder = folder
        self._said = folder.read("trainer.json") or {}
        jobs = {str(job["id"]): "trainer" if job["trains"] else "workers" for job in folder.jobs()}
        self._states = [(jobs[number], state) for number, state in states_of(list(jobs))]
        self._trainer = next(state.state for who, state in self._states if who == "trainer")
        is_done = self._trainer == "COMPLETED" or self._said.get("why") == DONE
        self.is_over = self._trainer in _ENDED
        self.exit_code = int(self.is_over and not is_done)
        self.may_come_back = not is_done and self._said.get("state") != ENDED

    @property
    def key(self) -> tuple[object, ...]:
        """A value that changes whenever the report should be printed again."""
        states = [(state.job_id, state.state) for _, state in self._states]
        return (*states, self._said.get("state"), self._said.get("since"))

    @property
    def text(self) -> str:
        """The report in words."""
        lines = [f"run {self._folder.path}", *(state.row(who) for who, state in self._states)]
        if self._said:
            lines.append(trainer_in_words(self._said, self._trainer == "RUNNING"))
        return "\n".join([*lines, *self._folder.history(), *self._failures()])

    def _failures(self) -> Iterator[str]:
        """Return the last lines of the logs of tasks that failed."""
        names = [file.stem for file in sorted((self._folder.path / "failed").glob("*.json"))]
        # Tasks that had no time to write a file about their failure.
        names += [f"{state.job_id}_0" for _, state in self._states if state.state in _FAILED]
        names = list(dict.fromkeys(names))
        for name in names[:_MOST_TAILS]:
            about = self._folder.read(f"failed/{name}.json")
            job_id, _, rank = name.rpartition("_")
            log = self._folder.logs / f"{name}_log.err"
            how = f", {about['how']} on {about['host']}" if about else ""
            yield f"\njob {job_id}, task {rank}{how}; the last lines of {log}:"
            try:
                tail = log.read_text(errors="replace").splitlines()[-_TAIL_LINES:] or ["(empty)"]
            except OSError:
                tail = ["(there is no such file: does that host see this folder?)"]
            yield from (f"  {line}" for line in tail)
        if len(names) > _MOST_TAILS:
            yield f"\nand {len(names) - _MOST_TAILS} more, see {self._folder.logs}"


def states_of(job_ids: Sequence[str]) -> Iterator[tuple[str, JobState]]:
    """Each of these jobs with its state, or with those of an array's jobs.

    Raises:
        LaunchError: SLURM doesn't answer.
    """
    # One id alone that SLURM has forgotten would be an error.
    done = run_command([*_SQUEUE, ",".join([*job_ids, job_ids[0]])], COMMAND_TIMEOUT_S)
    if done.returncode:
        raise LaunchError(f"SLURM doesn't show the jobs of the run: {done.stderr.strip()}")
    found = [JobState(*line.split("|")) for line in done.stdout.splitlines()]
    for job_id in job_ids:
        own = [state for state in found if state.job_id.partition("_")[0] == job_id]
        yield from ((job_id, state) for state in own or [JobState(job_id, GONE)])


def follow(folder: RunFolder) -> int:
    """Print every change until the trainer has ended; 1 if it failed.

    Raises:
        LaunchError: SLURM doesn't answer.
    """
    key: tuple[object, ...] = ()
    over_since = math.inf
    while True:
        report = Report(folder)
        if report.key != key:
            print(report.text, end="\n\n", flush=True)
            key = report.key
        now = time.monotonic()
        over_since = min(over_since, now) if report.is_over else math.inf
        if now - over_since >= _SETTLE_S * report.may_come_back:
            return report.exit_code
        time.sleep(_POLL_S)
