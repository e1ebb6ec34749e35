"""The ranks that take part: how they meet, and what the trainer measures between them.

The measurements go by the transport and the broadcasts of a run.
"""

from __future__ import annotations

import resource
import socket
import statistics
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from distcollect.commands.doctor.checks import Finding
from distcollect.commands.doctor.host_report import HostReport, inspect_host
from distcollect.common.shared_memory import sample_for, sample_of_memory
from distcollect.errors import DeadlineError
from distcollect.net.client import ControlConnection
from distcollect.net.interfaces import listen
from distcollect.net.messages import Exit, Hello, Message, PeerAddress, Refused, WorkerWelcome
from distcollect.net.server import Connection, JoinServerEvents
from distcollect.transport.peer_ids import identity
from distcollect.transport.start import start_server, start_transport
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


@dataclass(frozen=True, kw_only=True)
class DoctorHello(Hello):
    """A rank of a launch joins the doctor."""

    role = "rank of the doctor"


@dataclass(frozen=True)
class Examined(Message):
    """A rank can be reached, and has inspected its host.

    Attributes:
        address: where its transport is reached.
        report: what it found.
    """

    address: PeerAddress
    report: HostReport


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
        """Return the time of day here, in seconds."""
        return time.time()

    def fetch(self, num_bytes: int) -> list[torch.Tensor]:
        """Return ``num_bytes`` in several tensors, which are sent side by side."""
        return [torch.zeros(num_bytes // _PIECES, dtype=torch.uint8) for _ in range(_PIECES)]

    def join(self, source: WeightSource) -> None:
        """Get ready for a broadcast."""
        source.join(self._keep)

    def receive(self, source: WeightSource, num_bytes: int) -> None:
        """Receive the broadcast."""
        source.receive(torch.empty(num_bytes, dtype=torch.uint8), self._keep)

    def idle(self, seconds: float) -> float:
        """Return the CPU time that this process uses while it waits, see :func:`idle_cores`."""
        return idle_cores(seconds)

    def open_probe(self) -> int:
        """Open a port that accepts one connection and discards what arrives; return the port."""
        listener = listen(self._address)
        listener.settimeout(TIMEOUT_S)
        threading.Thread(target=_discard, args=(listener,), daemon=True).start()
        return int(listener.getsockname()[1])

    def probe(self, address: str, port: int) -> tuple[float, float]:
        """Send to the probe port of another rank; return seconds to connect, and bytes/s."""
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
    """Return the CPU time that this process uses while the calling thread waits, per second."""

    def used_s() -> float:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return used.ru_utime + used.ru_stime

    before, began = used_s(), time.perf_counter()
    threading.Event().wait(seconds)
    return (used_s() - before) / (time.perf_counter() - began)


def take_part(control: ControlConnection, rank: int) -> bool:
    """Answer the trainer until it has finished; return True if it said so."""
    address, welcome = control.local_address, control.welcome
    assert isinstance(welcome, WorkerWelcome)
    server = start_server(Rank(rank, address), address)
    try:
        reached = PeerAddress(server.endpoint, sample_for(welcome.trainer_memory))
        control.send(Examined(reached, inspect_host(rank, address)))
        while (message := control.receive()) is not None:
            if isinstance(message, Exit):
                return True
        return False
    finally:
        server.close()
        control.close()


class Ranks(JoinServerEvents):
    """The trainer's side: the ranks that have joined.

    Its measurements raise DistCollectError if a rank doesn't answer in time, and RuntimeError if a
    broadcast fails.

    Attributes:
        reports: maps a rank to what it found.
        findings: the problems of those that have not joined.
    """

    def __init__(self, address: str, num_ranks: int) -> None:
        """Admit ranks 1 to ``num_ranks - 1``; ``address`` is the trainer's."""
        self.reports: dict[int, HostReport] = {}
        self.findings: list[Finding] = []
        self._num_ranks = num_ranks
        self._connections: dict[Connection, int] = {}
        self._peers: dict[int, int] = {}  # the id in RPC of each rank
        self._changed = threading.Condition()
        self._transport = start_transport(address)
        self._weights = BroadcastUpdater("gloo")
        self._weights.attach(UpdaterContext(address, TIMEOUT_S, gpus={}))

    def close(self) -> None:
        """Leave all process groups, and release the transport."""
        self._weights.close()
        self._transport.close()

    def wait(self, timeout_s: float) -> None:
        """Wait until all have joined or failed; those that have not are a finding."""

        def missing() -> list[str]:
            return [str(rank) for rank in range(1, self._num_ranks) if rank not in self.reports]

        with self._changed:
            self._changed.wait_for(lambda: len(missing()) <= len(self.findings), timeout_s)
            if len(missing()) > len(self.findings):
                problem = f"did not join within {timeout_s:g} s"
                remedy = (
                    "read their own output. Was the same command started on their hosts, and do "
                    "firewalls let them reach the trainer?"
                )
                self.findings.append(Finding("ranks", ", ".join(missing()), problem, remedy))

    def end(self) -> None:
        """Tell all ranks to end."""
        for connection in list(self._connections):
            connection.send(Exit())

    def admit(self, connection: Connection) -> Message:
        if not isinstance(connection.hello, DoctorHello):
            return Refused("this is distcollect doctor, which takes no workers")
        peer = identity().new_peer()
        self._connections[connection] = peer
        return WorkerWelcome(peer, sample_of_memory())

    def refused(self, hello: Hello | None, reason: str) -> None:
        where = f"a rank on {'an unknown host' if hello is None else hello.host}"
        remedy = "all hosts need the same versions, and the same DISTCOLLECT_TOKEN_FILE"
        self._note(Finding("versions", where, f"it was refused: {reason}", remedy))

    def failed(self, where: str, reason: str) -> None:
        """Note that a rank could not be started, or failed."""
        remedy = (
            "install distcollect there, with the versions of Python and torch that rank 0 has; or "
            "have Ray install it by a runtime_env"
        )
        self._note(Finding("ranks", where, reason, remedy))

    def _note(self, finding: Finding) -> None:
        with self._changed:
            self.findings.append(finding)
            self._changed.notify_all()

    def received(self, connection: Connection, message: Message) -> None:
        assert isinstance(message, Examined)
        peer, report = self._connections[connection], message.report
        self._transport.connect(peer, message.address)
        with self._changed:
            self._peers[report.rank] = peer
            self.reports[report.rank] = report
            self._changed.notify_all()

    def closed(self, connection: Connection) -> None:
        peer = self._connections.pop(connection, None)
        if peer is not None:
            self._transport.disconnect(peer)

    def reach(self, rank: int) -> float:
        """Call a rank; return the time of day there."""
        theirs: float = self._call(rank, Rank.clock)
        return theirs

    def measure(self, rank: int) -> Link:
        """Measure the link to a rank."""
        self.reach(rank)  # opens the connection
        round_trips, offsets = [], []
        for _ in range(_ROUND_TRIPS):
            sent, began = time.time(), time.perf_counter()
            theirs = self.reach(rank)
            round_trips.append(time.perf_counter() - began)
            offsets.append(theirs - sent - round_trips[-1] / 2)
        return Link(
            round_trip_s=statistics.median(round_trips),
            fetch_bytes_per_s=_speed(lambda n: self._call(rank, Rank.fetch, n)),
            broadcast_bytes_per_s=self.broadcast([rank]),
            skew_s=skew(round_trips, offsets),
            shares_memory=self._transport.shares_memory(self._peers[rank]),
        )

    def hop(self, one: int, other: int) -> tuple[float, float]:
        """Connect from one rank to another; return seconds to connect, and bytes/s."""
        port = self._call(other, Rank.open_probe)
        found: tuple[float, float] = self._call(one, Rank.probe, self.reports[other].address, port)
        return found

    def broadcast(self, ranks: Collection[int]) -> float:
        """Return the bytes per second of a broadcast to these ranks."""
        return _speed(lambda n: self._broadcast(ranks, n))

    def idle(self, ranks: Collection[int], seconds: float) -> dict[int, float]:
        """Return the CPU time per second of each rank while nothing happens, and of rank 0."""
        answers = {rank: self._ask(rank, Rank.idle, seconds) for rank in ranks}
        own = idle_cores(seconds)
        return {0: own, **{rank: _answer(each) for rank, each in answers.items()}}

    def _ask(self, rank: int, method: Callable[..., Any], *args: Any) -> Future[Any]:
        return self._transport.call(self._peers[rank], method, *args)

    def _call(self, rank: int, method: Callable[..., Any], *args: Any) -> Any:
        return _answer(self._ask(rank, method, *args))

    def _broadcast(self, ranks: Collection[int], num_bytes: int) -> None:
        payload = torch.zeros(num_bytes, dtype=torch.uint8)
        sources = self._weights.sources(payload, {rank: self._peers[rank] for rank in ranks})
        for rank in ranks:
            self._call(rank, Rank.join, sources[rank])
        receipts = [self._ask(rank, Rank.receive, sources[rank], num_bytes) for rank in ranks]
        self._weights.send(payload)
        for receipt in receipts:
            _answer(receipt)


def _answer(answer: Future[Any]) -> Any:
    try:
        return answer.result(TIMEOUT_S)
    except FutureTimeoutError as error:
        raise DeadlineError(f"no answer within {TIMEOUT_S:g} s") from error


def _speed(move: Callable[[int], object]) -> float:
    """Return the bytes per second of ``move(num_bytes)``, with enough bytes for a measurement."""
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
    """Return how far another clock is ahead, by the fastest round trip: its error is smallest."""
    return min(zip(round_trips, offsets, strict=True))[1]
