"""Many workers that only answer: what a trainer needs for each of them, by TCP with TLS."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from helpers.join_server import TOKEN
from helpers.loopback_transport import answer_of
from helpers.scripts.transport_peer import Service
from helpers.transport_contract import SMALL, SOON_S, Tls, check, num_threads

from distcollect.common.peer_ids import identity
from distcollect.net.messages import PeerAddress
from distcollect.transport.protocol import CollectRequest, Offer

# Of 400 kB: with these, memory that is not given back would show.
WIDE = 10_000
ROUNDS = 6
MOST_GROWTH = 32 << 20


class Light(Tls):
    """All peers are in one other process."""

    def __init__(self, number: int) -> None:
        self.number, self.earlier = number, set(threading.enumerate())
        super().__init__()

    def add_peer(self) -> int:
        process = self.start(self.server.port, TOKEN, self.number)
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        begin = time.monotonic()
        process.stdin.write("\n")
        process.stdin.flush()
        self.peers = []
        for _ in range(self.number):
            connection = self.events.next("admitted")
            self.peers.append(identity().new_peer())
            self.transport.connect(self.peers[-1], PeerAddress(""), connection)
        self.joined_s = time.monotonic() - begin
        return self.peers[0]

    def collect(self, num_steps: int) -> None:
        """Have each peer collect a rollout, then fetch all of them."""
        request = CollectRequest(num_steps)
        asked = [answer_of(self.transport.collect, peer, request) for peer in self.peers]
        offers: list[Offer] = [answer.result(SOON_S) for answer in asked]
        fetched: list[Future[list[torch.Tensor]]] = [answer_of(offer.fetch) for offer in offers]
        for answer in fetched:
            check(answer.result(SOON_S), num_steps)


@pytest.fixture(params=[16, 128, pytest.param(256, marks=pytest.mark.slow)])
def light(request: pytest.FixtureRequest) -> Iterator[Light]:
    world = Light(request.param)
    yield world
    world.close()


def resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) * 1024


def test_one_thread_no_polling_and_no_growth(light: Light) -> None:
    light.collect(SMALL)
    light.collect(WIDE)
    threads = num_threads()
    assert [light.transport.call(p, Service.echo, p) for p in light.peers]
    before = resident_bytes()
    used_s = time.process_time()
    for _ in range(ROUNDS):
        light.collect(SMALL)
    used_s = time.process_time() - used_s
    for _ in range(ROUNDS):
        light.collect(WIDE)
    growth = resident_bytes() - before
    print(
        f"{light.number} workers joined within {light.joined_s:.2f} s; "
        f"{1e6 * used_s / ROUNDS / light.number:.0f} us of CPU for a rollout, "
        f"{growth >> 20} MiB more after {ROUNDS} rounds"
    )
    assert growth < MOST_GROWTH
    assert num_threads() <= threads
    # One serves them all, and one copies what lies in shared memory.
    assert len(set(threading.enumerate()) - light.earlier) <= 2
    # Nobody has to do anything now.
    begin, idle_s = time.monotonic(), time.process_time()
    time.sleep(1)
    assert time.process_time() - idle_s < 0.1 * (time.monotonic() - begin)
