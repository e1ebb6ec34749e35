"""The ranks that take part: how they meet, and what the trainer measures between them.

A rank reports on its host by its control connection, also where RPC does not get through. The
measurements go by the transport of a run, and by its broadcasts if it has them.
"""

from __future__ import annotations

import contextlib
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
from distcollect.common.peer_ids import identity
from distcollect.common.shared_memory import sample_for, sample_of_memory
from distcollect.errors import DeadlineError
from distcollect.launch.rendezvous import ListenSpec
from distcollect.net.client import join
from distcollect.net.interfaces import listen
from distcollect.net.messages import (
    Hello,
    Message,
    PeerAddress,
    Refused,
    TrainerAddress,
    WorkerWelcome,
)
from distcollect.net.server import Connection, JoinServer, JoinServerEvents
from distcollect.net.tls import trainer_tls
from distcollect.transport.start import chosen, exposure, start_server, start_transport
from distcollect.transport.worker_service import WeightSource
from distcollect.weights.broadcast import BroadcastUpdater
from distcollect.weights.updaters import TransportUpdater, UpdaterContext, WeightUpdaterBase

TIMEOUT_S = 10.0
_ROUND_TRIPS = 50
_NUM_BYTES = 4 << 20  # of a message; more would take too long on a slow network
_AIM_S = 0.3  # about how long a measurement takes
_PIECES = 8


@dataclass(frozen=True, kw_only=True)
class DoctorHello(Hello):
    """A rank of a launch joins the doctor."""

    role = "rank of the doctor"


@dataclass(frozen=True)
class Examined(Message):
    """A rank can be reached, and has inspected its host.

    Attributes:
        address: where its transport is reached.
        port: of its host's address, to which other ranks can connect.
        report: what it found.
    """

    address: PeerAddress
    port: int
    report: HostReport


class Link(NamedTuple):
    """What was measured between the trainer and one worker.

    Attributes:
        round_trip_s: median duration of an empty call, in seconds.
        fetch_bytes_per_s: rate of tensors to the trainer.
        weights_bytes_per_s: rate of weights from the trainer.
        shares_memory: whether each can map the other's memory.
    """

    round_trip_s: float
    fetch_bytes_per_s: float
    weights_bytes_per_s: float
    shares_memory: bool


class Rank:
    """Answers the trainer's calls, on threads of the transport."""

    service_methods = frozenset({"answer", "fetch", "join", "receive", "connect_to"})

    def __init__(self, rank: int, address: str) -> None:
        self.worker_id = rank
        self._keep: dict[str, Any] = {"address": address}

    def answer(self) -> None:
        """Do nothing: the trainer measures how long that takes."""

    def fetch(self, num_bytes: int) -> list[torch.Tensor]:
        """Return ``num_bytes`` in several tensors, which are sent side by side."""
        return [torch.zeros(num_bytes // _PIECES, dtype=torch.uint8) for _ in range(_PIECES)]

    def join(self, source: WeightSource) -> None:
        """Get ready for weights."""
        source.join(self._keep)

    def receive(self, source: WeightSource, num_bytes: int) -> None:
        """Receive them."""
        source.receive(torch.empty(num_bytes, dtype=torch.uint8), self._keep)

    def connect_to(self, address: str, port: int) -> None:
        """Connect to another rank."""
        socket.create_connection((address, port), TIMEOUT_S / 2).close()


def take_part(find: Callable[[], TrainerAddress], rank: int, timeout_s: float) -> None:
    """Join the doctor as a rank, and answer the trainer until it has finished.

    Args:
        find: returns where the trainer is; raises OSError if that isn't known yet.
        rank: of this process.
        timeout_s: how long to try to reach the trainer.

    Raises:
        LaunchError: the trainer can't be reached, or refused.
    """
    control, _ = join(find, DoctorHello(), timeout_s, name=f"rank {rank}")
    address, welcome = control.local_address, control.welcome
    assert isinstance(welcome, WorkerWelcome)
    # Nobody accepts what connects there: the kernel completes the connection.
    with listen(address) as listener:
        server = start_server(welcome.transport, Rank(rank, address), control, address)
        try:
            reached = PeerAddress(server.endpoint, sample_for(welcome.trainer_memory))
            port = listener.getsockname()[1]
            control.send(Examined(reached, port, inspect_host(rank, address, welcome.transport)))
            control.receive()  # until the trainer closes the connection
        finally:
            server.close()
            control.close()


def take_part_at(trainer: TrainerAddress, rank: int, timeout_s: float) -> None:
    """Join the doctor where its trainer is known to be; see :func:`take_part`."""
    take_part(lambda: trainer, rank, timeout_s)


class Ranks(JoinServerEvents):
    """The trainer's side: the ranks that have joined.

    Its measurements raise DistCollectError if a rank doesn't answer in time, and RuntimeError if a
    broadcast fails.

    Attributes:
        trainer: where the ranks join.
        reports: maps a rank to what it found; the trainer's is there from the beginning.
        findings: the problems of those that have not joined.
        broadcasts: whether weights are passed on from rank to rank.
    """

    def __init__(self, spec: ListenSpec, num_ranks: int) -> None:
        """Admit ranks 1 to ``num_ranks - 1``."""
        transport = chosen(None)
        self.reports: dict[int, HostReport] = {0: inspect_host(0, spec.address, transport)}
        self.findings: list[Finding] = []
        self._num_ranks = num_ranks
        self._connections: dict[Connection, int] = {}
        self._peers: dict[int, int] = {}  # the transport's id of each rank
        self._ports: dict[int, int] = {}
        self._changed = threading.Condition()
        with contextlib.ExitStack() as undo:
            self._transport = start_transport(transport, spec.address, spec.token)
            undo.callback(self._transport.close)
            self.broadcasts = not self._transport.carries_weights
            self._weights: WeightUpdaterBase = TransportUpdater()
            if self.broadcasts:
                self._weights = BroadcastUpdater("gloo")
            self._weights.attach(UpdaterContext(spec.address, TIMEOUT_S, gpus={}))
            undo.callback(self._weights.close)
            tls = trainer_tls(spec.address)
            server = self._server = JoinServer(spec.address, spec.token, self, spec.port, tls=tls)
            undo.callback(server.close)
            spec.announce(server.port)
            self._undo = undo.pop_all()
        self.trainer = TrainerAddress(spec.address, server.port, spec.token)

    def exposure(self, *, others_join: bool) -> list[str]:
        """Return what listens in a run, to which workers that it does not start may join."""
        server = self._server if others_join else None
        said = exposure(self._transport.name, self.trainer.host, server)
        return [*said, *filter(None, [self._weights.exposure])]

    def close(self) -> None:
        """End all ranks, leave all process groups, and release the transport."""
        self._undo.close()

    def wait(self, timeout_s: float) -> None:
        """Wait until all have joined or failed; those that have not are a finding."""

        def missing() -> list[str]:
            return [str(rank) for rank in range(self._num_ranks) if rank not in self.reports]

        with self._changed:
            self._changed.wait_for(lambda: len(missing()) <= len(self.findings), timeout_s)
            if len(missing()) > len(self.findings):
                problem = f"did not join within {timeout_s:g} s"
                remedy = (
                    "read their own output. Was the same command started on their hosts, and do "
                    "firewalls let them reach the trainer?"
                )
                self.findings.append(Finding("ranks", ", ".join(missing()), problem, remedy))

    def admit(self, connection: Connection) -> Message:
        if not isinstance(connection.hello, DoctorHello):
            return Refused("this is distcollect doctor, which takes no workers")
        peer = self._connections[connection] = identity().new_peer()
        return WorkerWelcome(peer, sample_of_memory(), self._transport.name)

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
        peer, rank = self._connections[connection], message.report.rank
        self._transport.connect(peer, message.address, connection)
        with self._changed:
            self._peers[rank], self._ports[rank] = peer, message.port
            self.reports[rank] = message.report
            self._changed.notify_all()

    def closed(self, connection: Connection) -> None:
        peer = self._connections.pop(connection, None)
        if peer is not None:
            self._transport.disconnect(peer)

    def reach(self, rank: int) -> None:
        """Call a rank."""
        self._call(rank, Rank.answer)

    def measure(self, rank: int) -> Link:
        """Measure the link to a rank."""
        self.reach(rank)  # opens the connection
        round_trips = []
        for _ in range(_ROUND_TRIPS):
            began = time.perf_counter()
            self.reach(rank)
            round_trips.append(time.perf_counter() - began)
        return Link(
            round_trip_s=statistics.median(round_trips),
            fetch_bytes_per_s=_speed(lambda n: self._call(rank, Rank.fetch, n)),
            weights_bytes_per_s=self.send_weights([rank]),
            shares_memory=self._transport.shares_memory(self._peers[rank]),
        )

    def connect(self, one: int, other: int) -> None:
        """Have one rank connect to another."""
        self._call(one, Rank.connect_to, self.reports[other].address, self._ports[other])

    def send_weights(self, ranks: Collection[int]) -> float:
        """Return the bytes per second at which weights go to all of these ranks."""
        return _speed(lambda n: self._send_weights(ranks, n))

    def _call(self, rank: int, method: Callable[..., Any], *args: Any) -> None:
        _wait(self._transport.call(self._peers[rank], method, *args))

    def _send_weights(self, ranks: Collection[int], num_bytes: int) -> None:
        payload = torch.zeros(num_bytes, dtype=torch.uint8)
        peers = {rank: self._peers[rank] for rank in ranks}
        sources = self._weights.sources(payload, peers)
        for rank in ranks:
            self._call(rank, Rank.join, sources[rank])
        receipts = [
            self._transport.call(peer, Rank.receive, sources[rank], num_bytes)
            for rank, peer in peers.items()
        ]
        self._weights.send(payload)
        for receipt in receipts:
            _wait(receipt)


def _wait(answer: Future[Any]) -> None:
    try:
        answer.result(TIMEOUT_S)
    except FutureTimeoutError as error:
        raise DeadlineError(f"no answer within {TIMEOUT_S:g} s") from error


def _speed(move: Callable[[int], object]) -> float:
    """Return the bytes per second of ``move(num_bytes)``, repeated for :data:`_AIM_S`."""
    move(_NUM_BYTES)  # makes buffers and connections
    began, took_s, moved = time.perf_counter(), 0.0, 0
    while took_s < _AIM_S:
        move(_NUM_BYTES)
        moved += _NUM_BYTES
        took_s = time.perf_counter() - began
    return moved / took_s
