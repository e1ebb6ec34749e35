"""How the ranks meet: the trainer's side, and that of the other ranks."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from distcollect.commands.doctor.host_report import HostReport, inspect_host
from distcollect.commands.doctor.links import Rank
from distcollect.common.shared_memory import sample_for, sample_of_memory
from distcollect.net.client import ControlConnection
from distcollect.net.messages import Exit, Hello, Message, PeerAddress, Refused, WorkerWelcome
from distcollect.net.server import Connection, JoinServerEvents
from distcollect.transport.peer_ids import identity
from distcollect.transport.protocol import Transport
from distcollect.transport.start import start_server


@dataclass(frozen=True, kw_only=True)
class DoctorHello(Hello):
    """A rank of a launch joins the doctor."""

    role = "rank of the doctor"


@dataclass(frozen=True)
class Examined(Message):
    """A rank can be reached, and has inspected its host.

    Attributes:
        address: where its transport is reached.
        report: what it found.
    """

    address: PeerAddress
    report: HostReport


class DoctorServer(JoinServerEvents):
    """The ranks that have joined.

    Attributes:
        reports: maps a rank to its report.
        peers: maps a rank to its id in RPC.
        refusals: host and reason of each process that was refused.
        failures: name and reason of each process that could not be started, or failed.
    """

    def __init__(self, transport: Transport, num_ranks: int) -> None:
        """Admit ranks 1 to ``num_ranks - 1``, and connect them to ``transport``."""
        self.reports: dict[int, HostReport] = {}
        self.peers: dict[int, int] = {}
        self.refusals: list[tuple[str, str]] = []
        self.failures: list[tuple[str, str]] = []
        self._transport = transport
        self._num_ranks = num_ranks
        self._connections: dict[Connection, int] = {}
        self._changed = threading.Condition()

    def wait(self, timeout_s: float) -> list[int]:
        """Wait for all ranks; return those that are still missing after ``timeout_s``."""

        def missing() -> list[int]:
            return [rank for rank in range(1, self._num_ranks) if rank not in self.reports]

        deadline = time.monotonic() + timeout_s
        with self._changed:
            while (
                len(missing()) > len(self.refusals) + len(self.failures)
                and time.monotonic() < deadline
            ):
                self._changed.wait(deadline - time.monotonic())
            return missing()

    def end(self) -> None:
        """Tell all ranks to end."""
        for connection in list(self._connections):
            connection.send(Exit())

    def admit(self, connection: Connection) -> Message:
        if not isinstance(connection.hello, DoctorHello):
            return Refused("this is distcollect doctor, which takes no workers")
        peer = identity().new_peer()
        self._connections[connection] = peer
        return WorkerWelcome(peer, sample_of_memory())

    def refused(self, hello: Hello | None, reason: str) -> None:
        with self._changed:
            self.refusals.append(("an unknown host" if hello is None else hello.host, reason))
            self._changed.notify_all()

    def failed(self, where: str, reason: str) -> None:
        """A rank could not be started, or failed."""
        with self._changed:
            self.failures.append((where, reason))
            self._changed.notify_all()

    def received(self, connection: Connection, message: Message) -> None:
        assert isinstance(message, Examined)
        report = message.report
        peer = self._connections[connection]
        self._transport.connect(peer, message.address)
        with self._changed:
            self.peers[report.rank] = peer
            self.reports[report.rank] = report
            self._changed.notify_all()

    def closed(self, connection: Connection) -> None:
        peer = self._connections.pop(connection, None)
        if peer is not None:
            self._transport.disconnect(peer)


def take_part(control: ControlConnection, rank: int) -> bool:
    """Answer the trainer until it has finished; return whether it said so."""
    address, welcome = control.local_address, control.welcome
    assert isinstance(welcome, WorkerWelcome)
    server = start_server(Rank(rank, address), address)
    try:
        reached = PeerAddress(server.endpoint, sample_for(welcome.trainer_memory))
        control.send(Examined(reached, inspect_host(rank, address)))
        while (message := control.receive()) is not None:
            if isinstance(message, Exit):
                return True
        return False
    finally:
        server.close()
        control.close()
