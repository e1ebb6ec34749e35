"""Which interface leads to other hosts, and sockets on it; over several hosts see test_hosts.py."""

from __future__ import annotations

import socket

import pytest

import distcollect as dc
from distcollect.net.interfaces import (
    interface_of,
    listen,
    route_to,
)
from distcollect.transport.rpc_agents import ip_address_in


def test_interface_of() -> None:
    for address in ("127.5.5.5", route_to("127.0.0.1"), route_to("localhost")):
        assert interface_of(address) == "lo"
    assert interface_of("203.0.113.1") is None  # reserved for documentation: no host has it


def test_no_route() -> None:
    with pytest.raises(dc.LaunchError, match=r"no-such-host\.invalid.*MASTER_ADDR"):
        route_to("no-such-host.invalid")


def test_listens_on_one_address_alone() -> None:
    with listen("127.0.0.1") as listener:
        port = listener.getsockname()[1]
        socket.create_connection(("127.0.0.1", port), 5).close()
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.2", port), 5)
        with pytest.raises(dc.LaunchError, match=f"port {port}"):
            listen("127.0.0.1", port)


@pytest.mark.parametrize("address", ["0.0.0.0", "::"])
def test_refuses_to_listen_everywhere(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISTCOLLECT_ALLOW_PUBLIC", raising=False)
    with pytest.raises(dc.LaunchError):
        listen(address)


@pytest.mark.parametrize(
    ("endpoint", "address"),
    [("uv://10.0.0.5:4711", "10.0.0.5"), ("uv://[fd00::5]:4711", "fd00::5")],
)
def test_address_of_an_endpoint(endpoint: str, address: str) -> None:
    assert ip_address_in(endpoint) == address
