"""What listens for a run, who may connect there, and what is encrypted, in words."""

from __future__ import annotations

from distcollect.common.peer_ids import identity
from distcollect.net.server import JoinServer
from distcollect.transport.start import RPC

# Of a trainer's process, and of each of its workers'; measured with torch 2.13.
RPC_PORTS = 17


def exposure(transport: str, address: str, server: JoinServer | None) -> list[str]:
    """Return sentences, first about the port by which workers join.

    Args:
        transport: its name.
        address: this host's, on the interface by which workers reach it.
        server: where they join; None: all are started here.
    """
    said = ["nothing listens for workers that join, as all are started here"]
    if server is not None and server.port:
        encrypted = "TLS 1.3 encrypts all of it" if server.tls else "nothing is encrypted"
        who = f"who knows the token may connect; {encrypted}"
        said = [f"workers join at {address}:{server.port}; {who}"]
    if transport == RPC:
        said.append(
            f"torch's RPC listens at {RPC_PORTS} ports of {address}, and as many of each worker's "
            "host; whoever reaches one may run code; nothing is encrypted"
        )
    elif identity().num_trainers > 1:
        said.append("each worker listens for the other trainers in the same way")
    return [f"transport={transport!r}: {each}" for each in said]
