"""Where the ranks come together: the trainer's side, and that of the others."""

from __future__ import annotations

import threading
import time
from dataclasses import asdict

from distcollect.commands.doctor.host_report import HostReport, look
from distcollect.commands.doctor.links import Rank
from distcollect.common.shared_memory import Segment, sample_of_memory
from distcollect.net.client import ControlConnection
from distcollect.net.framing import Message
from distcollect.net.server import Connection, JoinServerEvents
from distcollect.transport.peer_ids import identity
from distcollect.transport.rpc import PeerAddress, RpcTransport

ROLE = "rank of the doctor"


class DoctorServer(JoinServerEvents):
    """The ranks that have come.

    Attributes:
        surveys: rank to what it found.
        peers: rank to its id in RPC.
        turned_away: host and reason of each that wasn't let in.
    """

    def __init__(self, transport: RpcTransport, num_ranks: int) -> None:
        """Admit all but this one of ``num_ranks``, and connect them to ``transport``."""
        self.surveys: dict[int, HostReport] = {}
        self.peers: dict[int, int] = {}
        self.turned_away: list[tuple[str, str]] = []
        self._transport = transport
        self._num_ranks = num_ranks
        self._connections: dict[Connection, int] = {}
        self._changed = threading.Condition()

    def wait(self, timeout_s: float) -> list[int]:
        """Wait for all; those that are missing after ``timeout_s``."""

        def missing() -> list[int]:
            return [rank for rank in range(1, self._num_ranks) if rank not in self.surveys]

        deadline = time.monotonic() + timeout_s
        with self._changed:
            while len(missing()) > len(self.turned_away) and time.monotonic() < deadline:
                self._changed.wait(deadline - time.monotonic())
            return missing()

    def dismiss(self) -> None:
        """Send all home."""
        for connection in list(self._connections):
            connection.send({"bye": True})

    def admit(self, connection: Connection) -> Message:
        """See :class:`~distcollect.net.server.JoinServerEvents`."""
        if connection.hello.get("role") != ROLE:
            return {"refused": "this is distcollect doctor, which has no work for it"}
        peer = identity().new_peer()
        self._connections[connection] = peer
        return {
            "peer": peer,
            "trainer_peer": identity().trainer,
            "trainer_endpoint": self._transport.endpoint,
        }

    def refused(self, hello: Message, reason: str) -> None:
        """See :class:`~distcollect.net.server.JoinServerEvents`."""
        with self._changed:
            self.turned_away.append((str(hello.get("host", "an unknown host")), reason))
            self._changed.notify_all()

    def received(self, connection: Connection, message: Message) -> None:
        """See :class:`~distcollect.net.server.JoinServerEvents`."""
        survey = HostReport(**message["survey"])
        peer = self._connections[connection]
        segment = message["segment"]
        sample = None if segment is None else Segment(**segment)
        self._transport.connect(peer, PeerAddress(message["endpoint"], sample))
        with self._changed:
            self.peers[survey.rank] = peer
            self.surveys[survey.rank] = survey
            self._changed.notify_all()

    def closed(self, connection: Connection) -> None:
        """See :class:`~distcollect.net.server.JoinServerEvents`."""
        peer = self._connections.pop(connection, None)
        if peer is not None:
            self._transport.disconnect(peer)


def take_part(lifeline: ControlConnection, rank: int) -> bool:
    """Be a rank that is looked at, until the trainer is done; whether it said so."""
    address, welcome = lifeline.local_address, lifeline.welcome
    transport = RpcTransport(welcome["peer"], address=address, service=Rank(rank, address))
    try:
        transport.connect(welcome["trainer_peer"], PeerAddress(welcome["trainer_endpoint"]))
        lifeline.send(
            {
                "endpoint": transport.endpoint,
                "survey": asdict(look(rank, address)),
                "segment": sample_of_memory(),
            }
        )
        while (message := lifeline.receive()) is not None:
            if "bye" in message:
                return True
        return False
    finally:
        transport.close()
        lifeline.close()
