"""Many workers over TCP that only answer: each is a thread of one other process."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future

import torch
from helpers import transport_peer
from helpers.join_server import TOKEN
from helpers.loopback_transport import answer_of
from helpers.transport_contract import SOON_S, Tcp

from distcollect.common.peer_ids import identity
from distcollect.net.messages import PeerAddress
from distcollect.transport.protocol import CollectRequest, Offer, Transport


class Light(Tcp):
    """A transport and so many peers."""

    def __init__(self, number: int, security: str = "tls") -> None:
        self.number, self.security = number, security
        self.earlier = set(threading.enumerate())
        super().__init__()

    def add_peer(self, is_mapped: bool = False) -> int:
        process = self.start(transport_peer.serve_many, self.server.port, TOKEN, self.number)
        assert process.recv() == "ready"
        begin = time.monotonic()
        process.send("begin")
        self.peers = []
        for _ in range(self.number):
            connection = self.events.next("admitted")
            self.peers.append(identity().new_peer())
            self.transport.connect(self.peers[-1], PeerAddress(""), connection)
        self.joined_s = time.monotonic() - begin
        return self.peers[0]


def collect_all(
    transport: Transport, peers: Sequence[int], request: CollectRequest
) -> list[list[torch.Tensor]]:
    """Have each peer collect a rollout, then fetch all of them."""
    asked = [answer_of(transport.collect, peer, request) for peer in peers]
    offers: list[Offer] = [answer.result(SOON_S) for answer in asked]
    fetched: list[Future[list[torch.Tensor]]] = [answer_of(offer.fetch) for offer in offers]
    return [answer.result(SOON_S) for answer in fetched]
