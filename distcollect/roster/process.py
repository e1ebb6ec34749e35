"""A worker process as its trainer sees it: what is known of it, and why it ended."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from distcollect.common.process_exit import ProcessExit, describe_exit
from distcollect.errors import (
    DeadlineError,
    DistCollectError,
    EnvError,
    PolicyError,
    WorkerError,
    WorkerLost,
)
from distcollect.net.server import Connection
from distcollect.roster.membership import WorkerPhase
from distcollect.transport.worker_service import WorkerInfo

ProcessKey = tuple[int, int]  # worker_id and incarnation

_PENDING = {
    WorkerPhase.PAUSED: "which has not been started yet",
    WorkerPhase.STARTED: "which has to join",
    WorkerPhase.PROBING: "which makes its envs and policy and tries them",
}
_MAX_NAMED = 5  # of those that are awaited


@dataclass(eq=False)
class Process:
    """A worker process that was started.

    Attributes:
        worker_id: its slot.
        incarnation: its number in this slot, counted from 0.
        peer: its id for the transport.
        over_rpc: that is torch's RPC.
        connection: its control connection; None before it has joined.
        info: what it found when it tried out its envs and policy; None before.
        failure: what went wrong; None: only ``exit`` is known.
        is_retired: it ends because it takes too much memory, and is replaced.
        ends_run: its failure would repeat in every process that replaced it.
        exit: how it ended; None: it was not reaped.
        ended_in: its slot's phase before it ended, or was ignored; None: it is in its slot.
        account_by: when its end is accounted for, though it was not reaped.
    """

    worker_id: int
    incarnation: int
    peer: int
    over_rpc: bool
    connection: Connection | None = None
    info: WorkerInfo | None = None
    failure: DistCollectError | None = None
    is_retired: bool = False
    ends_run: bool = False
    exit: ProcessExit | None = None
    ended_in: WorkerPhase | None = None
    account_by: float = math.inf

    @property
    def key(self) -> ProcessKey:
        return self.worker_id, self.incarnation

    @property
    def is_over(self) -> bool:
        """Return True if it has ended, or is ignored."""
        return self.ended_in is not None

    @property
    def where(self) -> str:
        """Its pid and host, as an error's text ends with it; "" if unknown."""
        if self.connection is None:
            return ""
        hello = self.connection.hello
        return f" (pid {hello.pid} on {hello.host})"

    def death(self, *, left: bool) -> DistCollectError:
        """The error for its end; ``left``: it left on purpose."""
        if isinstance(self.failure, DeadlineError) and self.exit is not None and self.exit.reason:
            return DeadlineError(f"{self.failure}; {self.exit.reason}")
        if self.failure is not None:
            return self.failure
        if left:
            message = "it has left, as it was asked to"
        elif self.exit is None:
            message = "its connection to the trainer broke off"
        elif self.exit.reason:
            message = self.exit.reason
        else:
            when, told = "", describe_exit(self.exit.code, may_use_rpc=self.over_rpc)
            if self.ended_in is WorkerPhase.STARTED:
                when, told = " before it had joined", f"{told}; see its own output"
            message = f"its process ended{when}: {told}"
        return WorkerLost(message + self.where, worker_id=self.worker_id)

    def overdue(self, phase: WorkerPhase, reason: str, start_timeout_s: float) -> DistCollectError:
        """The error for a deadline missed in this phase; ``reason``: which, if it was ready."""
        tasks = {WorkerPhase.STARTED: "join", WorkerPhase.PROBING: "make and reset its envs"}
        if phase not in tasks:
            return WorkerLost(reason + self.where, worker_id=self.worker_id)
        look = "its own output shows what it was doing; " if phase is WorkerPhase.STARTED else ""
        return DeadlineError(
            f"worker {self.worker_id} did not {tasks[phase]} within {start_timeout_s:g} s; {look}"
            "Faults(start_timeout_s=...) gives longer"
        )

    def cause(self, *, left: bool, stopping: bool = False) -> str:
        """The name of the cause of its end in the ledger.

        Args:
            left: it left on purpose.
            stopping: the run is over. What the user's code raised before counts nevertheless.
        """
        if isinstance(self.failure, PolicyError):
            return "policy_failed"
        if isinstance(self.failure, EnvError):
            return "env_failed"
        if stopping:
            return "shut_down"
        if left:
            return "left"
        if self.is_retired:
            return "retired"
        return "hung" if self.exit is not None and self.exit.reason else "worker_lost"


def message_of(error: DistCollectError) -> str:
    """An error's text without the worker that it names."""
    return error.message if isinstance(error, WorkerError) else str(error)


def mismatch(info: WorkerInfo, others: Iterable[WorkerInfo]) -> str:
    """What a worker's frames and weights have instead of those of others; "" if they are equal."""
    collecting = (each for each in others if each.layout is not None)
    first = next(collecting, info) if info.layout is not None else info
    if (info.layout, info.weights) == (first.layout, first.weights):
        return ""
    return f"its frames or weights differ from the others': {difference(info, first)}"


def difference(one: WorkerInfo, other: WorkerInfo) -> str:
    """Say what one worker has in frames and weights instead of what the other one has."""

    def parts(info: WorkerInfo) -> list[str]:
        weights = (f"weight {e.names[0]} {list(e.shape)} {e.dtype}" for e in info.weights.entries)
        if info.layout is None:
            return [*weights]
        rows = f"{list(info.layout.batch_size)} envs"
        return [rows, *map(str, info.layout.per_frame), *weights]

    own, others = parts(one), parts(other)
    mine = ", ".join(each for each in own if each not in others) or "less"
    theirs = ", ".join(each for each in others if each not in own) or "less"
    return f"{mine} instead of {theirs}; give all workers envs of equal spaces, and one policy"


def start_report(
    phases: Sequence[WorkerPhase],
    processes: Mapping[int, Process],
    elapsed_s: float,
    limit_s: float,
) -> str:
    """Say which workers are awaited, for what, and how long.

    Args:
        phases: of the workers that have to become ready, by worker_id.
        processes: those in the slots, by worker_id.
        elapsed_s: seconds since the start.
        limit_s: after this many seconds the start fails.
    """
    awaited = [worker_id for worker_id, phase in enumerate(phases) if phase in _PENDING]
    named = []
    for worker_id in awaited[:_MAX_NAMED]:
        where = processes[worker_id].where if worker_id in processes else ""
        named.append(f"worker {worker_id}{where}, {_PENDING[phases[worker_id]]}")
    if len(awaited) > _MAX_NAMED:
        named.append(f"{len(awaited) - _MAX_NAMED} more")
    return (
        f"{len(phases) - len(awaited)} of {len(phases)} workers are ready after {elapsed_s:.0f} s; "
        f"waiting up to {limit_s:g} s in all for {'; '.join(named)}"
    )
