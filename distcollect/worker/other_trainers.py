"""Where the other trainers of a run connect to a worker, to take its rollouts over.

Only for the transport over control connections, and only in a run with several trainers. The
worker listens as a trainer does: other trainers prove the run's token, strangers have the same
limits, and there is TLS if the worker's connection with its own trainer has it.
"""

from __future__ import annotations

from distcollect.net.client import ControlConnection
from distcollect.net.messages import Message, PeerAddress, Reachable
from distcollect.net.server import Connection, JoinServer, JoinServerEvents
from distcollect.net.tls import TLS, TlsSocket, trainer_tls
from distcollect.transport.protocol import Service
from distcollect.transport.start import TCP, start_server


class OtherTrainers(JoinServerEvents):
    """Answers the other trainers of a run.

    Attributes:
        endpoint: where they connect.
    """

    def __init__(self, service: Service, own: ControlConnection, token: str) -> None:
        """Listen on the interface of the connection with the worker's ``own`` trainer.

        Raises:
            LaunchError: see :class:`.JoinServer` and :func:`.trainer_tls`.
        """
        self._service = service
        address = own.local_address
        tls = trainer_tls(address, TLS) if isinstance(own.sock, TlsSocket) else None
        self.endpoint = f"{address}:{JoinServer(address, token, self, tls=tls).port}"

    def admit(self, connection: Connection) -> Message:
        start_server(TCP, self._service, connection)
        return Reachable(PeerAddress(self.endpoint))
