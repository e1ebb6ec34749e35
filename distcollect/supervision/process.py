"""Worker processes as those see them who look after them, and what these tell the pool."""

from __future__ import annotations

from dataclasses import dataclass

from distcollect.errors import DistCollectError, WorkerError, WorkerLost
from distcollect.launch.local_processes import End
from distcollect.net.server import Connection
from distcollect.transport.worker_service import Probe


@dataclass(eq=False)
class Process:
    """A process that was started.

    Attributes:
        peer: its id for the transport.
        connection: its lifeline, None before it has joined.
        reachable: by the transport.
        probe: what it found when it was tried out.
        failure: what went wrong, where more is known than the way it ended.
        retiring: it ends to be replaced.
        end: how it ended, once it was reaped.
        end_by: by when it is to have ended; None: it isn't to.
        account_by: by when its end is settled, whether or not it was reaped.
    """

    worker_id: int
    incarnation: int
    peer: int
    connection: Connection | None = None
    reachable: bool = False
    probe: Probe | None = None
    failure: DistCollectError | None = None
    retiring: bool = False
    end: End | None = None
    end_by: float | None = None
    account_by: float | None = None

    @property
    def key(self) -> tuple[int, int]:
        return self.worker_id, self.incarnation

    @property
    def is_over(self) -> bool:
        """Whether it has ended, or is heard no more."""
        return self.account_by is not None

    @property
    def due(self) -> float | None:
        """When something is to be done about its end."""
        return self.end_by if self.account_by is None else self.account_by

    @property
    def place(self) -> str:
        """Which process it is, for people."""
        if self.connection is None:
            return ""
        hello = self.connection.hello
        return f" (pid {hello.get('pid')} on {hello.get('host')})"


def death_of(process: Process) -> WorkerLost:
    """The error for a process that ended, where nothing more is known than how."""
    if process.end is None:
        message = "its connection to the trainer broke off"
    elif process.end.reason:
        message = process.end.reason
    elif process.reachable:
        message = f"its process ended: {process.end}"
    else:
        message = f"its process ended before it had joined: {process.end}; its own output says more"
    return WorkerLost(message + process.place, worker_id=process.worker_id)


def message_of(error: DistCollectError) -> str:
    """What went wrong, without whom it happened to."""
    return error.message if isinstance(error, WorkerError) else str(error)


def cause_of(process: Process, *, left: bool) -> str:
    """What the ledger calls the end of a process."""
    if left:
        return "left"
    if process.retiring:
        return "retired"
    if process.end is not None and process.end.reason:
        return "hung"
    return "worker_lost"
