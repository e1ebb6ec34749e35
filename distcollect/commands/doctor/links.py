"""How fast, how far and how idle: measured between the trainer and each worker, as a run goes."""

from __future__ import annotations

import itertools
import socket
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Any

import torch

from distcollect.commands.doctor.host_report import HostReport, cpu_s
from distcollect.errors import DeadlineError, DistCollectError
from distcollect.net.interfaces import listen
from distcollect.transport.rpc import RpcTransport
from distcollect.transport.worker_service import WeightSource
from distcollect.weights.broadcast import BroadcastUpdater
from distcollect.weights.updaters import UpdaterContext

TIMEOUT_S = 10.0
_ROUND_TRIPS = 50
# Much more, and a slow network is in use for long; much less, and a fast one is not seen.
_FIRST_BYTES, _MOST_BYTES = 1 << 20, 64 << 20
_AIM_S = 0.3
_PIECES = 8
_PROBE_BYTES = 8 << 20


@dataclass(frozen=True)
class Link:
    """What was measured between the trainer and one worker.

    Attributes:
        round_trip_s: of an empty call, the median.
        fetch_bytes_per_s: of tensors by RPC, to the trainer.
        broadcast_bytes_per_s: of weights, from it.
        skew_s: by how much its clock is ahead.
        is_near: each can map the other's memory.
    """

    round_trip_s: float
    fetch_bytes_per_s: float
    broadcast_bytes_per_s: float
    skew_s: float
    is_near: bool


@dataclass(frozen=True)
class Hop:
    """What was measured from one worker's host to another's.

    Attributes:
        connect_s: until a TCP connection is there.
        bytes_per_s: over it.
    """

    connect_s: float
    bytes_per_s: float


class Rank:
    """What a rank answers to the trainer's calls, on threads of the RPC's."""

    service_methods = frozenset(
        {"clock", "fetch", "join", "receive", "idle", "open_probe", "probe"}
    )

    def __init__(self, rank: int, address: str) -> None:
        self.worker_id = rank
        self._keep: dict[str, Any] = {"address": address}
        self._address = address

    def clock(self) -> float:
        """The time of day here, in seconds."""
        return time.time()

    def fetch(self, num_bytes: int) -> list[torch.Tensor]:
        """So many bytes, in tensors that travel side by side."""
        return [torch.zeros(num_bytes // _PIECES, dtype=torch.uint8) for _ in range(_PIECES)]

    def join(self, source: WeightSource) -> None:
        """Be ready for a broadcast."""
        source.join(self._keep)

    def receive(self, source: WeightSource, num_bytes: int) -> None:
        """Take part in it."""
        source.receive(torch.empty(num_bytes, dtype=torch.uint8), self._keep)

    def idle(self, seconds: float) -> float:
        """Cores that this process uses while it waits."""
        return idle_cores(seconds)

    def open_probe(self) -> int:
        """A port that takes one connection and swallows what comes."""
        listener = listen(self._address)
        listener.settimeout(TIMEOUT_S)
        threading.Thread(target=_swallow, args=(listener,), daemon=True).start()
        return int(listener.getsockname()[1])

    def probe(self, address: str, port: int) -> tuple[float, float]:
        """Send to another's; seconds to connect, and bytes per second."""
        began = time.perf_counter()
        with socket.create_connection((address, port), TIMEOUT_S / 2) as sock:
            connected = time.perf_counter()
            sock.sendall(bytes(_PROBE_BYTES))
            sock.shutdown(socket.SHUT_WR)
            sock.recv(1)  # all has arrived
            return connected - began, _PROBE_BYTES / (time.perf_counter() - connected)


def _swallow(listener: socket.socket) -> None:
    with listener:
        try:
            sock, _ = listener.accept()
        except TimeoutError:
            return
        with sock:
            sock.settimeout(TIMEOUT_S)
            while sock.recv(1 << 20):
                pass
            sock.sendall(b"x")


def idle_cores(seconds: float) -> float:
    """Cores that this process uses while the calling thread waits for ``seconds``."""
    before, began = cpu_s(), time.perf_counter()
    threading.Event().wait(seconds)
    return (cpu_s() - before) / (time.perf_counter() - began)


class Links:
    """The trainer's side."""

    def __init__(self, transport: RpcTransport, address: str) -> None:
        """Measure by ``transport``; ``address`` is this host's."""
        self._transport = transport
        self._weights = BroadcastUpdater("gloo")
        self._weights.attach(UpdaterContext(address, TIMEOUT_S, gpus={}))

    def close(self) -> None:
        """Leave all groups."""
        self._weights.close()

    def reach(self, peer: int) -> None:
        """Call a rank; raises as :meth:`measure` does."""
        self._call(peer, Rank.clock)

    def measure(self, rank: int, peer: int) -> Link:
        """Measure the link with a rank.

        Raises:
            DistCollectError: it doesn't answer, or not in time.
            RuntimeError: the broadcast failed.
        """
        self.reach(peer)  # opens the connection
        round_trips, offsets = [], []
        for _ in range(_ROUND_TRIPS):
            sent = time.time()
            began = time.perf_counter()
            theirs = self._call(peer, Rank.clock)
            round_trips.append(time.perf_counter() - began)
            offsets.append(theirs - sent - round_trips[-1] / 2)
        return Link(
            round_trip_s=statistics.median(round_trips),
            fetch_bytes_per_s=_speed(lambda n: self._call(peer, Rank.fetch, n)),
            broadcast_bytes_per_s=_speed(lambda n: self._broadcast({rank: peer}, n)),
            skew_s=skew(round_trips, offsets),
            is_near=self._transport.is_near(peer),
        )

    def hops(
        self, surveys: list[HostReport], peers: Mapping[int, int]
    ) -> dict[tuple[int, int], Hop | str]:
        """Between hosts of workers, each by one of its ranks.

        Returns:
            (from, to) to what was measured, or to what is wrong.
        """
        hops: dict[tuple[int, int], Hop | str] = {}
        for one, other in itertools.permutations(surveys, 2):
            try:
                port = self._call(peers[other.rank], Rank.open_probe)
                measured = self._call(peers[one.rank], Rank.probe, other.address, port)
                hops[one.rank, other.rank] = Hop(*measured)
            except DistCollectError as error:
                hops[one.rank, other.rank] = link_problem(error)
        return hops

    def broadcast(self, peers: Mapping[int, int]) -> float:
        """Bytes per second of a broadcast to all; raises as :meth:`measure` does."""
        return _speed(lambda n: self._broadcast(peers, n))

    def idle(self, peers: Mapping[int, int], seconds: float) -> dict[int, float]:
        """Cores that each rank uses while nothing happens; this one is 0."""
        asked = {rank: self._transport.call(p, Rank.idle, seconds) for rank, p in peers.items()}
        cores = {0: idle_cores(seconds)}
        for rank, answer in asked.items():
            cores[rank] = _within(answer, TIMEOUT_S + seconds)
        return cores

    def _call(self, peer: int, method: Callable[..., Any], *args: Any) -> Any:
        return _within(self._transport.call(peer, method, *args))

    def _broadcast(self, peers: Mapping[int, int], num_bytes: int) -> None:
        payload = torch.zeros(num_bytes, dtype=torch.uint8)
        sources = self._weights.sources(payload, peers)
        for rank, peer in peers.items():
            self._call(peer, Rank.join, sources[rank])
        receipts = [
            self._transport.call(peer, Rank.receive, sources[rank], num_bytes)
            for rank, peer in peers.items()
        ]
        self._weights.send(payload)
        for receipt in receipts:
            _within(receipt)


def _within(answer: Future[Any], timeout_s: float = TIMEOUT_S) -> Any:
    try:
        return answer.result(timeout_s)
    except FutureTimeoutError as error:
        raise DeadlineError(f"no answer within {timeout_s:g} s") from error


def _speed(move: Any) -> float:
    """Bytes per second of ``move(num_bytes)``: once to see how it goes, then with as many."""
    move(_FIRST_BYTES)  # buffers, and connections made on first use
    num_bytes = _FIRST_BYTES
    while True:
        began = time.perf_counter()
        move(num_bytes)
        took_s = time.perf_counter() - began
        if took_s > _AIM_S / 3 or num_bytes == _MOST_BYTES:
            return num_bytes / took_s
        num_bytes = min(_MOST_BYTES, num_bytes * 8)


def skew(round_trips: list[float], offsets: list[float]) -> float:
    """By how much another clock is ahead: as the fastest round trip says, which errs least."""
    return min(zip(round_trips, offsets, strict=True))[1]


def link_problem(error: BaseException) -> str:
    """What is wrong with a link, by the error that it ended in."""
    # What torch said, where it said something.
    return (str(error.__cause__ or "") or str(error)).partition("\n")[0]
