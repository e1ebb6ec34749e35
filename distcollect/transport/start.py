"""Which transport a run uses: the only module that names one, so another is added here."""

from __future__ import annotations

from distcollect.transport.protocol import Server, Service, Transport
from distcollect.transport.rpc import RpcTransport
from distcollect.transport.rpc_server import RpcServer


def start_transport(address: str) -> Transport:
    """Start the transport of a trainer.

    Args:
        address: this host's, on the interface by which workers reach it.

    Raises:
        CollectorStateError: this process uses torch.distributed.rpc itself.
        LaunchError: this torch lacks a private part that is needed, or the address is public.
    """
    return RpcTransport(address)


def start_server(service: Service, address: str) -> Server:
    """Answer the calls of trainers for ``service``; the rest is as in :func:`start_transport`."""
    return RpcServer(service, address)
