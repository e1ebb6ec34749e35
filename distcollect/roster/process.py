"""A worker process as its trainer sees it: its state, and why it ended."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from distcollect.common.process_exit import ProcessExit
from distcollect.errors import DeadlineError, DistCollectError, WorkerError, WorkerLost
from distcollect.net.connection import Connection
from distcollect.transport.worker_service import WorkerInfo

S = TypeVar("S", bound=enum.Enum)

Key = tuple[int, int]  # worker_id and incarnation


class IllegalTransition(RuntimeError):
    """A state was to follow one that it can't follow: a mistake in this package."""


def check_transition(table: Mapping[S, frozenset[S]], before: S, after: S) -> None:
    """Raise IllegalTransition unless ``table`` lets ``after`` follow ``before``."""
    if after not in table[before]:
        raise IllegalTransition(f"{before} can't become {after}")


class ProcessState(enum.Enum):
    """The state of a worker process."""

    STARTED = enum.auto()  # it has to join, and to connect its transport
    PROBING = enum.auto()  # it makes its envs and policy, and tries them out
    READY = enum.auto()  # it serves requests
    DRAINING = enum.auto()  # it is to leave, and still owes the pool something
    EXITING = enum.auto()  # it was told to end
    LOST = enum.auto()  # it has ended, or is ignored; how it ended may not be known yet
    ACCOUNTED = enum.auto()  # its end was reported


_NEXT: dict[ProcessState, frozenset[ProcessState]] = {
    ProcessState.STARTED: frozenset({ProcessState.PROBING, ProcessState.LOST}),
    ProcessState.PROBING: frozenset({ProcessState.READY, ProcessState.LOST}),
    ProcessState.READY: frozenset({ProcessState.DRAINING, ProcessState.LOST}),
    ProcessState.DRAINING: frozenset({ProcessState.EXITING, ProcessState.LOST}),
    ProcessState.EXITING: frozenset({ProcessState.LOST}),
    ProcessState.LOST: frozenset({ProcessState.ACCOUNTED}),
    ProcessState.ACCOUNTED: frozenset(),
}


@dataclass(eq=False)
class Process:
    """A worker process that was started.

    Attributes:
        worker_id: its slot.
        incarnation: its number in this slot, counted from 0.
        peer: its id for the transport.
        state: see :class:`ProcessState`; :meth:`enter` changes it.
        deadline: when to act if the state has not changed by then, in seconds of the monotonic
            clock: an EXITING process is killed, the end of a LOST one is accounted for.
        connection: its control connection; None before it has joined.
        probe: what it found when it tried out its envs and policy; None before.
        failure: what went wrong; None: only ``exit`` is known.
        is_retired: it ends because it takes too much memory, and is replaced.
        ends_run: its failure would repeat in every process that replaced it.
        exit: how it ended; None: it was not reaped.
    """

    worker_id: int
    incarnation: int
    peer: int
    state: ProcessState = ProcessState.STARTED
    deadline: float = math.inf
    connection: Connection | None = None
    probe: WorkerInfo | None = None
    failure: DistCollectError | None = None
    is_retired: bool = False
    ends_run: bool = False
    exit: ProcessExit | None = None
    _joined: bool = False

    def enter(self, state: ProcessState, deadline: float = math.inf) -> None:
        """Change the state.

        Raises:
            IllegalTransition: it can't follow the present one.
        """
        check_transition(_NEXT, self.state, state)
        self._joined |= state is ProcessState.PROBING
        self.state = state
        self.deadline = deadline

    @property
    def key(self) -> Key:
        return self.worker_id, self.incarnation

    @property
    def is_over(self) -> bool:
        """Whether it has ended, or is ignored."""
        return self.state in (ProcessState.LOST, ProcessState.ACCOUNTED)

    @property
    def where(self) -> str:
        """Its pid and host, as an error's text ends with it; "" if unknown."""
        if self.connection is None:
            return ""
        hello = self.connection.hello
        return f" (pid {hello.pid} on {hello.host})"

    @property
    def death(self) -> WorkerLost:
        """The error for its end, if nothing more is known than how it ended."""
        if self.exit is None:
            message = "its connection to the trainer broke off"
        elif self.exit.reason:
            message = self.exit.reason
        elif self._joined:
            message = f"its process ended: {self.exit}"
        else:
            message = f"its process ended before it had joined: {self.exit}; see its own output"
        return WorkerLost(message + self.where, worker_id=self.worker_id)

    def overdue(self, reason: str, start_timeout_s: float) -> DistCollectError:
        """The error for a missed deadline; ``reason``: which, if it was ready before."""
        name = f"worker {self.worker_id}"
        if self.state is ProcessState.STARTED:
            return DeadlineError(
                f"{name} did not join within {start_timeout_s:g} s; its own output shows what it "
                "was doing; Faults(start_timeout_s=...) gives longer"
            )
        if self.state is ProcessState.PROBING:
            return DeadlineError(
                f"{name} did not make and reset its envs within {start_timeout_s:g} s; "
                "Faults(start_timeout_s=...) gives longer"
            )
        return WorkerLost(reason + self.where, worker_id=self.worker_id)

    def cause(self, *, left: bool) -> str:
        """The name of the cause of its end in the ledger; ``left``: it left on purpose."""
        if left:
            return "left"
        if self.is_retired:
            return "retired"
        if self.exit is not None and self.exit.reason:
            return "hung"
        return "worker_lost"


def message_of(error: DistCollectError) -> str:
    """An error's text without the worker that it names."""
    return error.message if isinstance(error, WorkerError) else str(error)
