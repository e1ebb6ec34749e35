"""A transport over torch's RPC, for the contract suite; no torch without RPC can import it."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import transport_peer
from helpers.transport_contract import Processes

from distcollect.common.peer_ids import identity
from distcollect.net.messages import PeerAddress
from distcollect.transport import rpc_agents
from distcollect.transport.rpc import RpcTransport


class Rpc(Processes):
    @staticmethod
    def send_by_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(rpc_agents, "CHANNELS", ["basic"])

    def __init__(self) -> None:
        self.transport = RpcTransport("127.0.0.1")
        super().__init__()

    def add_peer(self, is_mapped: bool = False) -> int:
        peer = identity().new_peer()  # ids are never used twice in one process
        process = self.start(transport_peer.serve_rpc, rpc_agents.CHANNELS)
        endpoint, sample = process.recv()
        self.transport.connect(peer, PeerAddress(endpoint, sample if is_mapped else None))
        return peer

    def sent_bytes(self) -> int:
        """The bytes that the peer has written to its sockets (with the channel "basic" alone)."""
        counters = Path(f"/proc/{self.pid}/io").read_text().splitlines()
        return int(dict(line.split(": ") for line in counters)["wchar"])
