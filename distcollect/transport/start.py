"""Which transport a run uses: the only module that names one, so another is added here."""

from __future__ import annotations

import importlib
import logging
import os
from typing import Any

from distcollect.errors import ArgumentError
from distcollect.net.client import ControlConnection
from distcollect.net.server import Connection
from distcollect.transport.protocol import Server, Service, Transport
from distcollect.transport.tcp import TcpTransport
from distcollect.transport.tcp_server import TcpServer

TRANSPORT = "DISTCOLLECT_TRANSPORT"
RPC, TCP = "rpc", "tcp"

log = logging.getLogger(__name__)


def _rpc(module: str) -> Any:
    """Import a module that needs torch's RPC: some torch may be without it.

    Raises:
        ImportError: this one is.
    """
    return importlib.import_module(f"distcollect.transport.{module}")


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
        missing: list[str] = _rpc("rpc_agents").missing_symbols()
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
    transport: Transport = _rpc("rpc").RpcTransport(address)
    return transport


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
    server: Server = _rpc("rpc_server").RpcServer(service, address)
    return server
