"""The states of jobs: SLURM's names for them, and what they mean to the user."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from distcollect.integrations.slurm.jobs import COMMAND_TIMEOUT_S
from distcollect.integrations.slurm.task import run_command

_SACCT = (
    *("sacct", "--allocations", "--noheader", "--parsable2"),
    *("--format", "JobID,State,ExitCode,Elapsed,NodeList"),
)

# Of jobs that have not ended.
ALIVE = {
    "PENDING": "waits in the queue",
    "CONFIGURING": "its nodes are being prepared",
    "RUNNING": "",
    "SUSPENDED": "suspended by the cluster",
    "STOPPED": "stopped by the cluster",
    "COMPLETING": "is ending",
    "RESIZING": "",
    "SIGNALING": "",
    "STAGE_OUT": "is ending",
    "REQUEUED": "goes back to the queue",
    "REQUEUE_FED": "goes back to the queue",
    "REQUEUE_HOLD": "goes back to the queue, held: 'scontrol release ID' lets it go on",
    "SPECIAL_EXIT": "goes back to the queue, held: 'scontrol release ID' lets it go on",
}
# Of jobs that have ended.
ENDINGS = {
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


class JobState(NamedTuple):
    """The state of one job, or of one job of an array.

    Attributes:
        job_id: its id, such as "12" or "12_3".
        state: SLURM's name for the state.
        reason: why it waits, or who cancelled it; "" if unknown.
        exit_code: the highest exit code of its tasks; None: it has not ended, or that is unknown.
        signal: the signal that ended it; 0: none.
        restarts: how often it was requeued.
        run_time: "H:MM:SS" since it last started.
        nodes: the hosts that it runs or ran on.
    """

    job_id: str
    state: str
    reason: str = ""
    exit_code: int | None = None
    signal: int = 0
    restarts: int = 0
    run_time: str = ""
    nodes: str = ""

    @property
    def is_over(self) -> bool:
        """Whether it has ended and is not requeued."""
        return self.state in ENDINGS

    @property
    def meaning(self) -> str:
        """The state in words."""
        words = ALIVE.get(self.state) or ENDINGS.get(self.state, "")
        if self.state == UNKNOWN:
            words = "SLURM doesn't know it (any more)"
        if self.state == "FAILED" and self.exit_code is not None:
            words = f"a task ended with exit code {self.exit_code}"
            words += f", signal {self.signal}" if self.signal else ""
        if self.reason and self.state in ("PENDING", "CANCELLED"):
            words += f" ({self.reason})"
        if self.restarts:
            words += f"{', ' if words else ''}requeued {self.restarts} time(s) so far"
        return words


def query(job_ids: Sequence[str]) -> list[JobState]:
    """The states of jobs, with one entry for each job of an array; UNKNOWN if SLURM forgot it."""
    found: list[JobState] = []
    for job_id in job_ids:
        shown = _output_of(["scontrol", "show", "job", "--oneliner", job_id])
        states = list(parse_scontrol(shown)) or parse_sacct(_output_of([*_SACCT, "--jobs", job_id]))
        found += states or [JobState(job_id, UNKNOWN)]
    return found


def earlier_starts(job_ids: Sequence[str]) -> list[str]:
    """How earlier starts of requeued jobs ended, in words; needs SLURM's accounting."""
    if not job_ids:
        return []
    accounts = _output_of([*_SACCT, "--duplicates", "--jobs", ",".join(job_ids)])
    by_job: dict[str, list[JobState]] = {}
    for state in parse_sacct(accounts):
        by_job.setdefault(state.job_id, []).append(state)
    return [
        f"{start.job_id}: {start.state} after {start.run_time} on {start.nodes}"
        for states in by_job.values()
        for start in states[:-1]
    ]


def parse_scontrol(shown: str) -> Iterator[JobState]:
    """Read the output of ``scontrol show job --oneliner``."""
    for line in shown.splitlines():
        words = dict(re.findall(r"(\S+?)=(\S*)", line))
        if "JobId" not in words or "JobState" not in words:
            continue
        code, _, number = words.get("ExitCode", "0:0").partition(":")
        state = words["JobState"]
        about = JobState(
            words["JobId"],
            state,
            "" if words.get("Reason", "None") == "None" else words["Reason"],
            int(code) if state in ENDINGS else None,
            int(number or 0),
            int(words.get("Restarts", 0)),
            words.get("RunTime", ""),
            words.get("NodeList", "").replace("(null)", ""),
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
        if line.count("|") < 4:
            continue
        job_id, words, codes, elapsed, nodes = line.split("|")[:5]
        state, _, reason = words.partition(" ")  # "CANCELLED by 1000"
        code, _, number = codes.partition(":")
        exit_code = int(code) if state in ENDINGS and code.isdigit() else None
        signal = int(number) if number.isdigit() else 0
        nodes = nodes.replace("None assigned", "")
        found.append(JobState(job_id, state, reason, exit_code, signal, 0, elapsed, nodes))
    return found


def _indices(text: str) -> Iterable[int]:
    """The indices in text such as "0-2,5%8"."""
    for part in text.partition("%")[0].split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            yield from range(int(first), int(last or first) + 1)


def _output_of(command: list[str]) -> str:
    done = run_command(command, COMMAND_TIMEOUT_S)
    return done.stdout if done.returncode == 0 else ""
