"""Which transport a run uses: the only module that names one, so another is added here."""

from __future__ import annotations

import logging
import os

from distcollect.common.peer_ids import identity
from distcollect.errors import ArgumentError
from distcollect.net.client import ControlConnection
from distcollect.net.server import Connection, JoinServer
from distcollect.transport.protocol import Server, Service, Transport
from distcollect.transport.tcp import TcpTransport
from distcollect.transport.tcp_server import TcpServer

TRANSPORT = "DISTCOLLECT_TRANSPORT"
RPC, TCP = "rpc", "tcp"
# Of a trainer's process, and of each of its workers'; measured with torch 2.13.
RPC_PORTS = 17

log = logging.getLogger(__name__)


def chosen(wanted: str | None, default: str = RPC) -> str:
    """Return the name of the transport.

    Args:
        wanted: by the user; None: what the environment says.
        default: where neither says anything.

    Raises:
        ArgumentError: there is no such transport, or it can't be used here.
    """
    name = f"transport={wanted!r}" if wanted else f"{TRANSPORT}={os.environ.get(TRANSPORT)!r}"
    value = wanted or os.environ.get(TRANSPORT)
    if value not in (None, "", RPC, TCP):
        raise ArgumentError(f"{name}: must be {RPC!r} or {TCP!r}")
    if (value or default) == TCP:
        return TCP
    try:
        from distcollect.transport.rpc_agents import missing_symbols  # noqa: PLC0415

        missing = missing_symbols()
    except ImportError as error:
        missing = [f"RPC ({error})"]
    if not missing:
        return RPC
    if value == RPC:
        raise ArgumentError(f"{name}: this torch lacks {', '.join(missing)}; use {TCP!r}")
    log.info("transport='tcp', as this torch lacks %s", ", ".join(missing))
    return TCP


def start_transport(name: str, address: str, token: str) -> Transport:
    """Start the transport of a trainer.

    Args:
        name: which one.
        address: this host's, on the interface by which workers reach it.
        token: the run's, by which workers of its other trainers let this one connect.

    Raises:
        CollectorStateError: this process uses torch.distributed.rpc itself.
        LaunchError: this torch lacks a private part that is needed, or the address is public.
    """
    if name == TCP:
        return TcpTransport(token)
    from distcollect.transport.rpc import RpcTransport  # noqa: PLC0415 - some torch has no RPC

    return RpcTransport(address)


def start_server(
    name: str, service: Service, connection: ControlConnection | Connection, address: str = ""
) -> Server:
    """Answer the calls of a trainer for ``service``.

    Args:
        name: which transport the trainer uses.
        service: what is called.
        connection: with the trainer.
        address: this host's, on the interface by which the trainer reaches it.

    Raises: as :func:`start_transport`.
    """
    if name == TCP:
        return TcpServer(service, connection)
    from distcollect.transport.rpc_server import RpcServer  # noqa: PLC0415 - see above

    return RpcServer(service, address)


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
