"""Which interface leads to other hosts, and sockets on it; see also test_hosts.py."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from shutil import which

import pytest

import distcollect as dc
from distcollect.net.interfaces import (
    interface_of,
    interfaces,
    listen,
    own_address_of,
    route_to,
    way_to,
)
from distcollect.transport.rpc import address_of
from distcollect.weights.broadcast import name_interface


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_the_way_to_oneself(host: str) -> None:
    assert interface_of(route_to(host)) == "lo"


def test_interface_of() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("127.5.5.5") == "lo"
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


@pytest.mark.parametrize("address", ["8.8.8.8", "2001:4860:4860::8888"])
def test_refuses_public_addresses(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISTCOLLECT_ALLOW_PUBLIC", raising=False)
    with pytest.raises(dc.LaunchError, match=f"public address {address}.*ALLOW_PUBLIC"):
        listen(address)
    monkeypatch.setenv("DISTCOLLECT_ALLOW_PUBLIC", "1")
    with pytest.raises(dc.LaunchError, match="can't listen"):  # allowed, but on no interface here
        listen(address)


@pytest.mark.parametrize("address", ["0.0.0.0", "::"])
def test_refuses_to_listen_everywhere(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISTCOLLECT_ALLOW_PUBLIC", raising=False)
    with pytest.raises(dc.LaunchError):
        listen(address)


@pytest.fixture
def spare() -> Iterator[str]:
    """An interface with several addresses."""
    name = f"dc{uuid.uuid4().hex[:8]}"
    add = ["ip", "link", "add", name, "type", "bridge"]
    if not which("ip") or subprocess.run(add, check=False, capture_output=True).returncode:
        pytest.skip("makes a network interface: needs root and iproute2")
    try:
        for address in ("10.213.77.1/32", "10.213.77.2/32", "fd00:213:77::1/128"):
            nodad = ["nodad"] if ":" in address else []
            subprocess.run(["ip", "addr", "add", address, "dev", name, *nodad], check=True)
        subprocess.run(["ip", "link", "set", name, "up"], check=True)
        yield name
    finally:
        subprocess.run(["ip", "link", "del", name], check=True)


def test_all_addresses_of_an_interface(spare: str) -> None:
    wanted = ["10.213.77.1", "10.213.77.2", "fd00:213:77::1"]
    assert interfaces()[spare][:3] == wanted
    for address in (*wanted, "fd00:213:77:0::1", "::ffff:10.213.77.2"):
        assert interface_of(address) == spare
    listen("fd00:213:77::1").close()
    start = (
        "from distcollect.transport.rpc import RpcTransport\n"
        "RpcTransport(1, address='10.213.77.2').close()"
    )
    command = [sys.executable, "-c", start]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert "listens on 10.213.77.1, not on 10.213.77.2" in done.stderr


def test_ways_that_lead_here(spare: str) -> None:
    for host in ("localhost", "127.0.1.1", "10.213.77.2", "fd00:213:77::1"):
        assert way_to(host) is None
    assert own_address_of("10.213.77.2") == "10.213.77.2"
    for name in ("localhost", "127.0.1.1", "no-such-host.invalid", "203.0.113.1"):
        assert own_address_of(name) is None


def test_nccl_is_told_the_interface(spare: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")  # so that monkeypatch restores it
    name_interface("10.213.77.2")
    assert os.environ["NCCL_SOCKET_IFNAME"] == "ib0"
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    for nowhere in ("127.0.0.1", "203.0.113.1"):
        name_interface(nowhere)
        assert "NCCL_SOCKET_IFNAME" not in os.environ
    name_interface("10.213.77.2")
    assert os.environ["NCCL_SOCKET_IFNAME"] == f"={spare}"


@pytest.mark.parametrize(
    ("endpoint", "address"),
    [("uv://10.0.0.5:4711", "10.0.0.5"), ("uv://[fd00::5]:4711", "fd00::5")],
)
def test_address_of_an_endpoint(endpoint: str, address: str) -> None:
    assert address_of(endpoint) == address
