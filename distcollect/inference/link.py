"""A worker's connections to its inference server, on its host or on another one."""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

from distcollect.common import tensor_cache
from distcollect.common.by_value import dumps
from distcollect.common.step_counter import TASK, StepCounter, Task
from distcollect.errors import DeadlineError
from distcollect.inference import protocol
from distcollect.inference.protocol import STREAM, Answer, Caller, Kind, Request, Served, Serving
from distcollect.net.framing import Buffer, Packet
from distcollect.policy.base import Woken
from distcollect.policy.live_weights import LiveWeights
from distcollect.rollout.spaces import Arrays, Leaf
from distcollect.transport import packing
from distcollect.transport.failure import Failure
from distcollect.transport.peer_connection import PeerConnection

# Between two attempts to reach a server that is being started, on this host and on another one.
_RETRY_S, _REMOTE_RETRY_S = 0.02, 0.2


class ServerGone(Exception):
    """The server has ended; another one takes its place."""


class Link:
    """What all engines of a worker's process know of the server. It belongs to their thread.

    Other threads may call :meth:`ring` and :meth:`stop`.

    Attributes:
        serving: which server it is.
        worker_id: the slot of this process.
        weights: their version is that of the last answer.
        least: no older policy_version may answer.
        server: the slot of the server; None before it has answered.
        endpoint: where the server listens: the name of its socket, or its address if it is on
            another host; "": not known yet.
        token: of the run.
    """

    endpoint = ""

    def __init__(
        self, serving: Serving, worker_id: int, counter: StepCounter, token: str = ""
    ) -> None:
        """Connect nowhere yet; ``counter`` says what the process does."""
        self.serving, self.worker_id, self.token = serving, worker_id, token
        self.weights = LiveWeights(None)
        self.least = 0
        self.server: int | None = None
        self._counters = [each for each in (counter, counter.evaluation) if each is not None]
        self._bell, self._ringer = socket.socketpair()
        self._bell.setblocking(False)
        self._ringer.setblocking(False)
        self._is_stopped = False
        self._connections: weakref.WeakSet[Connection] = weakref.WeakSet()

    def ring(self) -> None:
        """Have a wait that may be interrupted, the present or the next one, raise Woken."""
        with contextlib.suppress(OSError):  # it is full: it was rung
            self._ringer.send(b"!")

    def stop(self) -> None:
        """Have every wait raise Woken from now on."""
        self._is_stopped = True
        self.ring()

    def expect(self, version: int) -> None:
        """Have no older policy_version answer from now on."""
        self.least = max(self.least, version)
        self.weights.version = max(self.weights.version, version)

    def close(self) -> None:
        """Ask for nothing more."""
        for connection in self._connections:
            connection.close()
        self._bell.close()
        self._ringer.close()

    def connect(self, caller: Caller, deadline: float) -> Connection:
        """Connect to the server, once it is there.

        Raises:
            DeadlineError: it did not start in time.
            PolicyError: the policy can't be called with such observations.
            Woken: see :meth:`stop`.
        """
        while True:
            kind, pause_s = Connection, _RETRY_S
            if self._is_remote:
                kind, pause_s = RemoteConnection, _REMOTE_RETRY_S
            with contextlib.suppress(ServerGone):
                connection = kind(self, caller, deadline)
                self._connections.add(connection)
                return connection
            # Another thread is told where the next server is.
            self.wait(None, min(deadline, time.monotonic() + pause_s), may_wake=False)
            if time.monotonic() >= deadline:
                raise self.late()

    def wait(self, connected: socket.socket | None, deadline: float, *, may_wake: bool) -> bool:
        """Wait until there is something to receive; False: not in time.

        Meanwhile this process does nothing that it could hang in.
        """
        poll = select.poll()
        poll.register(self._bell, select.POLLIN)
        if connected is not None:
            poll.register(connected, select.POLLIN)
        with self._idle():
            while True:
                left_ms = max(0, round((deadline - time.monotonic()) * 1000))
                ready = [fd for fd, _ in poll.poll(left_ms)]
                if self._bell.fileno() in ready:
                    if self._is_stopped:
                        raise Woken
                    self._bell.recv(4096)
                    if may_wake:
                        raise Woken
                    ready.remove(self._bell.fileno())
                if ready:
                    return True
                if not left_ms:
                    return False

    @contextlib.contextmanager
    def _idle(self) -> Iterator[None]:
        before = [counter.cells[TASK] for counter in self._counters]
        for counter in self._counters:
            counter.cells[TASK] = Task.IDLE
        try:
            yield
        finally:
            for counter, task in zip(self._counters, before, strict=True):
                counter.cells[TASK] = task

    @property
    def _is_remote(self) -> bool:
        return bool(self.endpoint) and not self.endpoint.startswith("@")

    def late(self) -> DeadlineError:
        where = f"at {self.endpoint}" if self._is_remote else "of this host"
        return DeadlineError(
            f"the inference server {where} did not answer within {self.serving.timeout_s:g} s:"
            " see what the trainer logged about it; Faults(start_timeout_s=..., "
            "step_timeout_s=...) gives longer"
        )


class Connection:
    """A connection, and the memory that it shares with the server.

    Attributes:
        served: what the server has said of the policy; known from the hello on.
        inputs: ``[n, *shape]`` of observations, :data:`STREAM` and the state.
        outputs: of action, extras and the next state; None before the first actions.
        extras: leaves of the extras; known by then.
    """

    served: Served
    inputs: Arrays

    def __init__(self, link: Link, caller: Caller, deadline: float) -> None:
        """Connect, and say hello.

        Raises:
            ServerGone: it is not there, or has ended.
            DeadlineError, Woken, PolicyError: see :meth:`Link.connect`.
        """
        self._link = link
        self._number = 0
        self._num_rows, self._observation = caller.num_rows, caller.observation
        self.inputs = {}
        self.outputs: Arrays | None = None
        self.extras: tuple[Leaf, ...] = ()
        self._answers: dict[int, tuple[Answer, Failure | None]] = {}  # by number
        self._open()
        try:
            self.receive(self.send(Kind.HELLO, content=caller), deadline, may_wake=False)
        except BaseException:
            self.close()
            raise

    def send(
        self, kind: Kind, first: int = 0, num_rows: int = 0, drawn: int = -1, content: object = None
    ) -> int:
        """Send a request; returns its number.

        Raises:
            ServerGone: the server has ended.
        """
        self._number += 1
        request = Request(kind, self._number, first, num_rows, self._link.least, drawn)
        self._send(request, content)
        return self._number

    def receive(
        self, number: int, deadline: float, *, others: Collection[int] = (), may_wake: bool
    ) -> Answer:
        """Wait for the answer with this number; results lie in the memory then.

        Args:
            number: of the request.
            deadline: by then, in seconds of the monotonic clock.
            others: numbers of requests whose answers are kept if they come first.
            may_wake: see :meth:`Link.answer`.

        Raises:
            ServerGone, DeadlineError, Woken: see :class:`Link`.
            PolicyError: the policy raised.
        """
        while number not in self._answers:
            if not self._link.wait(self._socket, deadline, may_wake=may_wake):
                raise self._link.late()
            answer, failure = self._receive()
            self._answers[answer.number] = answer, failure
        answer, failure = self._answers[number]
        self._answers = {n: each for n, each in self._answers.items() if n in others}
        if failure is not None:
            raise failure.passed_on()
        return answer

    def close(self) -> None:
        """Ask for nothing more."""
        self._socket.close()

    def _open(self) -> None:
        self._socket = protocol.open_socket()
        try:
            self._socket.connect(protocol.address_of(self._link.endpoint))
            is_safe = protocol.is_same_user(self._socket)
        except OSError:
            is_safe = False
        if not is_safe:
            self._socket.close()
            raise ServerGone

    def _send(self, request: Request, content: object) -> None:
        try:
            protocol.send(self._socket, request, content)
        except ConnectionError:
            raise ServerGone from None

    def _receive(self) -> tuple[Answer, Failure | None]:
        """The next answer, and why it failed."""
        found = protocol.receive(self._socket, Answer)
        if found is None:
            raise ServerGone
        answer, fds = found
        told = protocol.unpacked(fds[0]) if fds else None
        return answer, self._learn(told, lambda *of: protocol.map_memory(fds[1], *of))

    def _learn(self, told: Any, arrays: Callable[[Iterable[Leaf], int], Arrays]) -> Failure | None:
        """Take what the server has said, if anything; return it if a request failed.

        ``arrays`` makes, or maps, the arrays that it has told of: the inputs, then the outputs.
        """
        if told is None or isinstance(told, Failure):
            return told
        if isinstance(told, Served):
            self.served = told
            self._link.server = told.worker_id
            self._link.weights.layout = told.weights
            self.inputs = arrays((*self._observation, STREAM, *told.inputs), self._num_rows)
        else:
            action, self.extras = told
            leaves = (*action, *self.extras, *(self.served.state or ()))
            self.outputs = arrays(leaves, self._num_rows)
        return None


class RemoteConnection(Connection):
    """A connection to a server on another host: what the rows hold is sent.

    It gets the packets of its :class:`PeerConnection`, on the thread of that.
    """

    allocate = staticmethod(tensor_cache.block)

    def _open(self) -> None:
        # In place of a socket, what tells that something has arrived.
        self._socket, self._waker = socket.socketpair()
        self._arrived: deque[Sequence[Buffer] | None] = deque()
        name = f"worker {self._link.worker_id}, which asks an inference server,"
        link = self._link
        self._peer = PeerConnection(link.endpoint, link.token, name, logging.DEBUG)
        self._peer.carry(self)

    def received(self, packet: Packet) -> None:
        self._arrived.append(packet.parts)
        self._wake()

    def ended(self) -> None:
        self._arrived.append(None)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # it was closed
            self._waker.send(b"!")

    def close(self) -> None:
        self._peer.carry(None)
        self._socket.close()
        self._waker.close()

    def _send(self, request: Request, content: object) -> None:
        # Copied, as they are on their way for longer than this call.
        arrays = [array[request.rows].copy() for array in self.inputs.values()]
        pickled = b"" if content is None else dumps(content)
        try:
            self._peer.send_packet(Packet(0, packing.pack((request, pickled, arrays))))
        except OSError:
            raise ServerGone from None

    def _receive(self) -> tuple[Answer, Failure | None]:
        self._socket.recv(1)
        if (parts := self._arrived.popleft()) is None:
            raise ServerGone
        request, answer, content, results = packing.unpack(parts)
        failure = self._learn(content, protocol.own_arrays)
        arrays = self.outputs if request.kind == Kind.CHOOSE else self.inputs
        for array, result in zip((arrays or {}).values(), results, strict=bool(results)):
            array[request.rows] = result
        return answer, failure
