"""Measures the links between ranks, and what they use while idle, with the transport of a run."""

from __future__ import annotations

import socket
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, NamedTuple

import torch

from distcollect.commands.doctor.host_report import cpu_s
from distcollect.errors import DeadlineError
from distcollect.net.interfaces import listen
from distcollect.transport.protocol import Transport
from distcollect.transport.worker_service import WeightSource
from distcollect.weights.broadcast import BroadcastUpdater
from distcollect.weights.updaters import UpdaterContext

TIMEOUT_S = 10.0
_ROUND_TRIPS = 50
# The bytes of a measurement. More would occupy a slow network for long; fewer say little about a
# fast one.
_FIRST_BYTES, _MOST_BYTES = 1 << 20, 64 << 20
_AIM_S = 0.3  # about how long a measurement takes
_PIECES = 8
_PROBE_BYTES = 8 << 20


class Link(NamedTuple):
    """What was measured between the trainer and one worker.

    Attributes:
        round_trip_s: median duration of an empty call, in seconds.
        fetch_bytes_per_s: rate of tensors to the trainer by RPC.
        broadcast_bytes_per_s: rate of weights from the trainer.
        skew_s: how far the worker's clock is ahead of the trainer's.
        shares_memory: whether each can map the other's memory.
    """

    round_trip_s: float
    fetch_bytes_per_s: float
    broadcast_bytes_per_s: float
    skew_s: float
    shares_memory: bool


class Hop(NamedTuple):
    """What was measured from one worker's host to another's.

    Attributes:
        connect_s: seconds until a TCP connection is open.
        bytes_per_s: rate over this connection.
    """

    connect_s: float
    bytes_per_s: float


class Rank:
    """Answers the trainer's calls, on threads of torch's RPC."""

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
        """``num_bytes`` in several tensors, which are sent side by side."""
        return [torch.zeros(num_bytes // _PIECES, dtype=torch.uint8) for _ in range(_PIECES)]

    def join(self, source: WeightSource) -> None:
        """Get ready for a broadcast."""
        source.join(self._keep)

    def receive(self, source: WeightSource, num_bytes: int) -> None:
        """Receive the broadcast."""
        source.receive(torch.empty(num_bytes, dtype=torch.uint8), self._keep)

    def idle(self, seconds: float) -> float:
        """CPU time that this process uses while it waits for ``seconds``, per second."""
        return idle_cores(seconds)

    def open_probe(self) -> int:
        """Open a port that accepts one connection and discards what arrives; return the port."""
        listener = listen(self._address)
        listener.settimeout(TIMEOUT_S)
        threading.Thread(target=_discard, args=(listener,), daemon=True).start()
        return int(listener.getsockname()[1])

    def probe(self, address: str, port: int) -> tuple[float, float]:
        """Send to the probe port of another rank; seconds to connect, and bytes per second."""
        began = time.perf_counter()
        with socket.create_connection((address, port), TIMEOUT_S / 2) as sock:
            connected = time.perf_counter()
            sock.sendall(bytes(_PROBE_BYTES))
            sock.shutdown(socket.SHUT_WR)
            sock.recv(1)  # sent when everything has arrived
            return connected - began, _PROBE_BYTES / (time.perf_counter() - connected)


def _discard(listener: socket.socket) -> None:
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
    """CPU time that this process uses while the calling thread waits, per second."""
    before, began = cpu_s(), time.perf_counter()
    threading.Event().wait(seconds)
    return (cpu_s() - before) / (time.perf_counter() - began)


class Links:
    """The trainer's side of the measurements."""

    def __init__(self, transport: Transport, address: str) -> None:
        """Measure by ``transport``; ``address`` is the trainer's address."""
        self._transport = transport
        self._weights = BroadcastUpdater("gloo")
        self._weights.attach(UpdaterContext(address, TIMEOUT_S, gpus={}))

    def close(self) -> None:
        """Leave all process groups."""
        self._weights.close()

    def reach(self, peer: int) -> None:
        """Call a rank; raises what :meth:`measure` raises."""
        self._call(peer, Rank.clock)

    def measure(self, rank: int, peer: int) -> Link:
        """Measure the link to a rank.

        Raises:
            DistCollectError: the rank doesn't answer in time.
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
            shares_memory=self._transport.shares_memory(peer),
        )

    def hop(self, one: int, other: int, address: str) -> Hop:
        """Measure the link from one rank to another at ``address``; raises as :meth:`measure`."""
        port = self._call(other, Rank.open_probe)
        return Hop(*self._call(one, Rank.probe, address, port))

    def broadcast(self, peers: Mapping[int, int]) -> float:
        """Bytes per second of a broadcast to all ranks; raises what :meth:`measure` raises."""
        return _speed(lambda n: self._broadcast(peers, n))

    def idle(self, peers: Mapping[int, int], seconds: float) -> dict[int, float]:
        """CPU time per second of each rank while nothing happens; rank 0 is this process."""
        answers = {rank: self._transport.call(p, Rank.idle, seconds) for rank, p in peers.items()}
        cores = {0: idle_cores(seconds)}
        for rank, answer in answers.items():
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
    """Bytes per second of ``move(num_bytes)``, with enough bytes for a measurement."""
    move(_FIRST_BYTES)  # makes buffers and connections
    num_bytes = _FIRST_BYTES
    while True:
        began = time.perf_counter()
        move(num_bytes)
        took_s = time.perf_counter() - began
        if took_s > _AIM_S / 3 or num_bytes == _MOST_BYTES:
            return num_bytes / took_s
        num_bytes = min(_MOST_BYTES, num_bytes * 8)


def skew(round_trips: list[float], offsets: list[float]) -> float:
    """How far another clock is ahead, by the fastest round trip: its error is the smallest."""
    return min(zip(round_trips, offsets, strict=True))[1]
