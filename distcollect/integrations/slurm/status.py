"""``distcollect status``: the jobs of a run on a SLURM cluster, and what SLURM says of them."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from distcollect.errors import ArgumentError
from distcollect.integrations.slurm.jobs import COMMAND_TIMEOUT_S, check_slurm
from distcollect.integrations.slurm.task import run_command
from distcollect.launch.run_folder import ENDED, LISTENING, RunFolder

_POLL_S = 3.0
# A job whose host failed, or that was preempted, may soon be back in the queue.
_SETTLE_S = 15.0
_TAIL_LINES = 15
_MOST_TAILS = 3

_SACCT = (
    *("sacct", "--allocations", "--noheader", "--parsable2"),
    *("--format", "JobID,State,ExitCode,Elapsed,NodeList"),
)

_REQUEUED = "goes back to the queue"
_HELD = f"{_REQUEUED}, held: 'scontrol release ID' lets it go on"
# Of jobs that have not ended; of others, there is nothing to say.
_ALIVE = {
    "PENDING": "waits in the queue",
    "CONFIGURING": "its nodes are being prepared",
    "SUSPENDED": "suspended by the cluster",
    "STOPPED": "stopped by the cluster",
    "COMPLETING": "is ending",
    "STAGE_OUT": "is ending",
    "REQUEUED": _REQUEUED,
    "REQUEUE_FED": _REQUEUED,
    "REQUEUE_HOLD": _HELD,
    "SPECIAL_EXIT": _HELD,
}
_ENDED = {
    "COMPLETED": "done",
    "FAILED": "a task failed",
    "CANCELLED": "cancelled",
    "TIMEOUT": "its time was up before it could be requeued: ask for more --time, or a longer "
    "--notice",
    "PREEMPTED": "a job with a higher priority took its nodes, and this cluster doesn't requeue "
    "it: submit it again, or to another partition",
    "NODE_FAIL": "one of its nodes went down",
    "OUT_OF_MEMORY": "it used more memory than it had requested: ask for more --mem-gb",
    "DEADLINE": "its deadline has passed",
    "BOOT_FAIL": "one of its nodes did not start",
    "REVOKED": "another cluster of the federation took it",
}
UNKNOWN = "UNKNOWN"
_MEANINGS = {**_ALIVE, **_ENDED, UNKNOWN: "SLURM doesn't know it (any more)"}
_MAY_COME_BACK = {"NODE_FAIL", "PREEMPTED", "FAILED", "CANCELLED", UNKNOWN}


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


class Report:
    """The state of a run at one moment.

    Attributes:
        trainer: the state of the trainer's job.
    """

    def __init__(self, folder: RunFolder) -> None:
        """Ask SLURM, and read the run's folder."""
        self._folder = folder
        self._said = folder.read("trainer.json") or {}
        self._states = [
            ("trainer" if job["trains"] else "workers", state)
            for job in folder.jobs()
            for state in query(str(job["id"]))
        ]
        self.trainer = next(state for who, state in self._states if who == "trainer")

    @property
    def exit_code(self) -> int:
        """1 if the trainer has failed, otherwise 0."""
        return int(self.trainer.is_over and self.trainer.state != "COMPLETED")

    @property
    def key(self) -> tuple[object, ...]:
        """A value that changes whenever the report should be printed again."""
        states = [(state.job_id, state.state, state.restarts) for _, state in self._states]
        return (*states, self._said.get("state"), self._said.get("since"))

    @property
    def text(self) -> str:
        """The report in words."""
        lines = [f"run {self._folder.path}"]
        for who, state in self._states:
            row = f"  {who}  {state.job_id:<12} {state.state:<13} {state.run_time:<11}"
            lines.append(f"{row} {state.nodes:<12} {state.meaning}".rstrip())
        if self._said:
            lines.append(trainer_in_words(self._said, self.trainer.state == "RUNNING"))
        lines += earlier_starts([state.job_id for _, state in self._states if state.restarts])
        return "\n".join([*lines, *self._folder.history(), *self._failures()])

    def _failures(self) -> Iterator[str]:
        """Return the last lines of the logs of tasks that failed."""
        names = [file.stem for file in sorted((self._folder.path / "failed").glob("*.json"))]
        # Tasks that had no time to write a file about their failure.
        bad = ("FAILED", "OUT_OF_MEMORY", "TIMEOUT", "NODE_FAIL")
        names += [f"{state.job_id}_0" for _, state in self._states if state.state in bad]
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


def follow(folder: RunFolder) -> int:
    """Print every change until the trainer has ended; 1 if it failed."""
    key: tuple[object, ...] = ()
    over_since: float | None = None
    while True:
        report = Report(folder)
        if report.key != key:
            print(report.text, end="\n\n", flush=True)
            key = report.key
        ended = report.trainer.is_over or report.trainer.state == UNKNOWN
        now = time.monotonic()
        over_since = (over_since or now) if ended else None
        settle_s = _SETTLE_S if report.trainer.state in _MAY_COME_BACK else 0.0
        if over_since is not None and now - over_since >= settle_s:
            return report.exit_code
        time.sleep(_POLL_S)


# What SLURM says.


class JobState(NamedTuple):
    """The state of one job, or of one job of an array.

    Attributes:
        job_id: its id, such as "12" or "12_3".
        state: SLURM's name for the state.
        exit_code: the highest exit code of its tasks, and the signal that ended it, as "0:9".
        run_time: "H:MM:SS" since it last started.
        nodes: the hosts that it runs or ran on.
        reason: why it waits, or who cancelled it; "" if unknown.
        restarts: how often it was requeued.
    """

    job_id: str
    state: str
    exit_code: str = ""
    run_time: str = ""
    nodes: str = ""
    reason: str = ""
    restarts: int = 0

    @property
    def is_over(self) -> bool:
        """Return True if it has ended and is not requeued."""
        return self.state in _ENDED

    @property
    def meaning(self) -> str:
        """The state in words."""
        words = _MEANINGS.get(self.state, "")
        code, _, signal = self.exit_code.partition(":")
        if self.state == "FAILED" and code:
            words = f"a task ended with exit code {code}"
            words += f", signal {signal}" if signal not in ("", "0") else ""
        if self.reason and self.state in ("PENDING", "CANCELLED"):
            words += f" ({self.reason})"
        if self.restarts:
            words += f"{', ' if words else ''}requeued {self.restarts} time(s) so far"
        return words


def query(job_id: str) -> list[JobState]:
    """The state of a job, or of each job of an array; UNKNOWN if SLURM forgot it."""
    states = list(parse_scontrol(_output_of(["scontrol", "show", "job", "--oneliner", job_id])))
    states = states or parse_sacct(_output_of([*_SACCT, "--jobs", job_id]))
    return states or [JobState(job_id, UNKNOWN)]


def earlier_starts(job_ids: Sequence[str]) -> list[str]:
    """How earlier starts of requeued jobs ended, in words; needs SLURM's accounting."""
    if not job_ids:
        return []
    states = parse_sacct(_output_of([*_SACCT, "--duplicates", "--jobs", ",".join(job_ids)]))
    last = {state.job_id: state for state in states}
    return [
        f"an earlier start of job {start.job_id}: {start.state} after {start.run_time} on "
        f"{start.nodes}"
        for start in states
        if start is not last[start.job_id]
    ]


def parse_scontrol(shown: str) -> Iterator[JobState]:
    """Read the output of ``scontrol show job --oneliner``."""
    for line in shown.splitlines():
        words = dict(re.findall(r"(\S+?)=(\S*)", line))
        if "JobId" not in words or "JobState" not in words:
            continue
        about = JobState(
            words["JobId"],
            words["JobState"],
            words.get("ExitCode", ""),
            words.get("RunTime", ""),
            words.get("NodeList", "").replace("(null)", ""),
            words.get("Reason", "None").replace("None", ""),
            int(words.get("Restarts", 0)),
        )
        if "ArrayJobId" not in words:
            yield about
            continue
        for index in _indices(words.get("ArrayTaskId", "")):
            yield about._replace(job_id=f"{words['ArrayJobId']}_{index}")


def parse_sacct(shown: str) -> list[JobState]:
    """Read the output of ``sacct --parsable2`` with JobID,State,ExitCode,Elapsed,NodeList."""
    found = []
    for line in shown.splitlines():
        job_id, words, code, elapsed, nodes = line.split("|")[:5]
        state, _, reason = words.partition(" ")  # "CANCELLED by 1000"
        nodes = nodes.replace("None assigned", "")
        found.append(JobState(job_id, state, code, elapsed, nodes, reason))
    return found


def _indices(text: str) -> Iterator[int]:
    """The indices in text such as "0-2,5%8"."""
    for part in text.partition("%")[0].split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            yield from range(int(first), int(last or first) + 1)


def _output_of(command: list[str]) -> str:
    done = run_command(command, COMMAND_TIMEOUT_S)
    return done.stdout if done.returncode == 0 else ""
