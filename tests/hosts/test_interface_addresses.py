"""Interfaces with several addresses; makes bridges, which needs root."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from shutil import which

import pytest

from distcollect.net.interfaces import (
    address_towards,
    interface_of,
    interfaces,
    listen,
    own_address_of,
)
from distcollect.weights.process_groups import name_interface


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
        "from distcollect.transport.rpc import RpcTransport\nRpcTransport('10.213.77.2').close()"
    )
    command = [sys.executable, "-c", start]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert "listens on 10.213.77.1 instead of 10.213.77.2" in done.stderr


def test_ways_that_lead_here(spare: str) -> None:
    for host in ("localhost", "127.0.1.1", "10.213.77.2", "fd00:213:77::1"):
        assert address_towards(host) is None
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
