"""Where other processes of a run than its trainer connect to a worker's process.

They are its other trainers, over the transport by control connections, and workers on other hosts
that ask an inference server. The process listens as a trainer does: whoever connects proves the
run's token, strangers have the same limits, and there is TLS if the process's connection with its
own trainer has it.
"""

from __future__ import annotations

from collections.abc import Callable

from distcollect.net.client import ControlConnection
from distcollect.net.messages import Message, PeerAddress, Reachable
from distcollect.net.server import Connection, JoinServer, JoinServerEvents
from distcollect.net.tls import TLS, TlsSocket, trainer_tls


class PeerListener(JoinServerEvents):
    """Answers other processes of the run.

    Attributes:
        endpoint: where they connect.
    """

    def __init__(
        self, own: ControlConnection, token: str, serve: Callable[[Connection], object]
    ) -> None:
        """Listen on the interface of the connection with the worker's ``own`` trainer.

        ``serve`` is called for each connection that has proven the token.

        Raises:
            LaunchError: see :class:`.JoinServer` and :func:`.trainer_tls`.
        """
        self._serve = serve
        address = own.local_address
        tls = trainer_tls(address, TLS) if isinstance(own.sock, TlsSocket) else None
        self.endpoint = f"{address}:{JoinServer(address, token, self, tls=tls).port}"

    def admit(self, connection: Connection) -> Message:
        self._serve(connection)
        return Reachable(PeerAddress(self.endpoint))


# Makes one that serves connections by this function.
Listen = Callable[[Callable[[Connection], object]], PeerListener]
