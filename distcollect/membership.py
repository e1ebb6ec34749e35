"""Who is in the run: workers join, serve, leave, or are lost."""

from __future__ import annotations

import enum
import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from .errors import DeadlineError, WorkerError, WorkerLost, WorkerMismatch
from .link import Connection, Gate, GateEvents, Message
from .processes import describe_exit
from .rpc import RpcTransport
from .shared import Segment
from .threads import LOOK_UP_S

log = logging.getLogger(__name__)

# One allocator for the whole life of this process: ids on the wire are never used twice, as torch
# caches connections by id. They are 16-bit there.
_peers = itertools.count(1)
_MAX_PEER = 2**15 - 1
TRAINER_PEER = 0


class State(enum.Enum):
    """What a worker is to the trainer."""

    JOINING = "joining"
    READY = "ready"
    LOST = "lost"
    LEFT = "left"


@dataclass
class Member:
    """The process in a worker's slot.

    Attributes:
        worker_id: the slot.
        incarnation: the how-manieth process in it, from 0.
        peer: its id for the transport.
        state: see :class:`State`.
        connection: its lifeline, None before it has joined.
        exit_code: once its process has ended and was reaped.
        failure: why it is lost.
    """

    worker_id: int
    peer: int
    incarnation: int = 0
    state: State = State.JOINING
    connection: Connection | None = None
    exit_code: int | None = None
    failure: WorkerError | None = None

    @property
    def host(self) -> str:
        """The host it runs on, "" before it has joined."""
        return str(self.connection.hello["host"]) if self.connection else ""

    @property
    def pid(self) -> int:
        """Its process id on its host, -1 before it has joined."""
        return int(self.connection.hello["pid"]) if self.connection else -1


class Spawner(Protocol):
    """Starts and ends the processes of workers, here or through a supervisor elsewhere."""

    def spawn(self, worker_id: int, boot: Mapping[str, Any], env: Mapping[str, str]) -> None:
        """Start a process that joins as ``worker_id``."""

    def kill(self, worker_id: int) -> None:
        """End it at once."""

    def close(self, grace_s: float) -> None:
        """Wait up to ``grace_s`` for all to end, then end them."""


class Members(GateEvents):
    """The workers of one collector, from their start to their end."""

    def __init__(
        self,
        gate: Gate,
        transport: RpcTransport,
        num_workers: int,
        on_lost: Callable[[Member], None],
    ) -> None:
        """Prepare slots 0 to ``num_workers`` - 1. ``on_lost`` is called on the gate's thread."""
        self._gate = gate
        self._transport = transport
        self._on_lost = on_lost
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        # Peers in the order of the slots, not of joining: the ids of trajectories start from them.
        self._members = {
            worker_id: Member(worker_id, peer=next(_peers)) for worker_id in range(num_workers)
        }
        self._closing = False

    @property
    def peers(self) -> dict[int, int]:
        """``{worker_id: peer}`` of the workers that are ready."""
        with self._lock:
            return {m.worker_id: m.peer for m in self._members.values() if m.state is State.READY}

    def start(self, spawner: Spawner, boot: Mapping[str, Any], env: Mapping[str, str]) -> None:
        """Start a process in every slot. Raises as the spawner does."""
        for worker_id in self._members:
            spawner.spawn(worker_id, {**boot, "worker_id": worker_id, "incarnation": 0}, env)

    def wait_ready(self, timeout_s: float) -> None:
        """Block until every worker is ready.

        Raises:
            WorkerLost, WorkerMismatch: one ended, or was turned away.
            DeadlineError: some have not joined; names them.
        """
        deadline = time.monotonic() + timeout_s
        with self._lock:
            while True:
                members = self._members.values()
                for member in members:
                    if member.failure is not None:
                        raise member.failure
                missing = [m.worker_id for m in members if m.state is not State.READY]
                if not missing:
                    return
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise DeadlineError(
                        f"workers {missing} did not join within {timeout_s:g} s; see their own "
                        "output for what they were doing"
                    )
                self._changed.wait(min(remaining, LOOK_UP_S))

    def stop(self) -> None:
        """Have all stop stepping and close their envs."""
        self._closing = True
        self._tell_all({"stop": True})

    def dismiss(self) -> None:
        """Have all end."""
        self._tell_all({"bye": True})

    def _tell_all(self, message: Message) -> None:
        with self._lock:
            connections = [m.connection for m in self._members.values() if m.connection]
        for connection in connections:
            connection.send(message)

    def failure_of(self, worker_id: int) -> WorkerError:
        """Why a worker is lost; waits a moment for its exit code, which says more than silence."""
        member = self._members[worker_id]
        with self._lock:
            self._changed.wait_for(lambda: member.exit_code is not None, timeout=1.0)
        ended = (
            "its connection to the trainer broke off"
            if member.exit_code is None
            else f"its process ended: {describe_exit(member.exit_code)}"
        )
        return WorkerLost(f"{ended} (pid {member.pid} on {member.host})", worker_id=worker_id)

    def exited(self, worker_id: int, code: int) -> None:
        """A worker's process was reaped."""
        with self._lock:
            member = self._members.get(worker_id)
            if member is None:
                return
            member.exit_code = code
            if member.state is State.JOINING and member.failure is None:
                member.failure = WorkerLost(
                    f"its process ended before it had joined: {describe_exit(code)}; its own "
                    "output says more",
                    worker_id=worker_id,
                )
            self._changed.notify_all()

    def admit(self, connection: Connection) -> Message:
        """See :class:`~distcollect.link.GateEvents`."""
        with self._lock:
            member = self._members.get(connection.hello.get("worker_id", -1))
            if member is None or member.connection is not None or member.peer > _MAX_PEER:
                return {"refused": "there is no free slot for it"}
            member.connection = connection
        return {
            "peer": member.peer,
            "trainer_peer": TRAINER_PEER,
            "trainer_endpoint": self._transport.endpoint,
        }

    def refused(self, hello: Message, reason: str) -> None:
        """See :class:`~distcollect.link.GateEvents`."""
        log.warning("turned away a %s from %s: %s", hello.get("role"), hello.get("host"), reason)
        with self._lock:
            member = self._members.get(hello.get("worker_id", -1))
            if member is not None and member.connection is None:
                member.failure = WorkerMismatch(
                    f"can't work with this trainer: {reason} (host {hello.get('host')})",
                    worker_id=member.worker_id,
                )
                self._changed.notify_all()

    def received(self, connection: Connection, message: Message) -> None:
        """See :class:`~distcollect.link.GateEvents`."""
        if "endpoint" not in message:
            return
        with self._lock:
            member = self._member_of(connection)
            if member is None:
                return
            segment = message.get("segment")
            self._transport.connect(
                member.peer, message["endpoint"], Segment(**segment) if segment else None
            )
            member.state = State.READY
            self._changed.notify_all()

    def closed(self, connection: Connection) -> None:
        """See :class:`~distcollect.link.GateEvents`."""
        with self._lock:
            member = self._member_of(connection)
            if member is None or member.state in (State.LOST, State.LEFT):
                return
            was_ready = member.state is State.READY
            member.state = State.LEFT if self._closing else State.LOST
            if member.state is State.LOST and not was_ready and member.failure is None:
                member.failure = WorkerLost(
                    "its connection broke off while it was joining", worker_id=member.worker_id
                )
            self._changed.notify_all()
        if member.state is State.LOST and was_ready:
            log.warning("worker %d on %s is lost", member.worker_id, member.host)
            self._on_lost(member)

    def _member_of(self, connection: Connection) -> Member | None:
        return next((m for m in self._members.values() if m.connection is connection), None)
