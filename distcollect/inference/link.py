"""A worker's connections to the inference server of its host."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections.abc import Collection, Iterator

from distcollect.common.step_counter import TASK, StepCounter, Task
from distcollect.errors import DeadlineError
from distcollect.inference import protocol
from distcollect.inference.protocol import (
    STREAM,
    Answer,
    Caller,
    Kind,
    Request,
    Served,
    Serving,
    Status,
)
from distcollect.policy.base import Woken
from distcollect.policy.live_weights import LiveWeights
from distcollect.rollout.spaces import Arrays, Leaf
from distcollect.transport.failure import Failure

# Between two attempts to reach a server that is being started.
_RETRY_S = 0.02


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
    """

    def __init__(self, serving: Serving, worker_id: int, counter: StepCounter) -> None:
        """Connect nowhere yet; ``counter`` says what the process does."""
        self.serving, self.worker_id = serving, worker_id
        self.weights = LiveWeights(None)
        self.least = 0
        self.server: int | None = None
        self._counters = [each for each in (counter, counter.evaluation) if each is not None]
        self._bell, self._ringer = socket.socketpair()
        self._bell.setblocking(False)
        self._ringer.setblocking(False)
        self._is_stopped = False

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
        """Wait for nothing more."""
        self._bell.close()
        self._ringer.close()

    def connect(self, deadline: float) -> socket.socket:
        """Connect to the server, once it is there.

        Raises:
            DeadlineError: it did not start in time.
            Woken: see :meth:`stop`.
        """
        while True:
            connected = protocol.open_socket()
            try:
                connected.connect(self.serving.address)
            except OSError:
                connected.close()
            else:
                if protocol.is_same_user(connected):
                    return connected
                connected.close()
            # Nothing tells when a process takes the name of the socket.
            self.wait(None, min(deadline, time.monotonic() + _RETRY_S), may_wake=False)
            if time.monotonic() >= deadline:
                raise self._late()

    def answer(
        self, connected: socket.socket, deadline: float, *, may_wake: bool
    ) -> tuple[Answer, list[int]]:
        """Wait for the next answer of a connection; and the descriptors that came with it.

        Raises:
            ServerGone: the server has ended.
            DeadlineError: there was none in time.
            Woken: see :meth:`stop`, and if it ``may_wake`` :meth:`ring`.
        """
        if not self.wait(connected, deadline, may_wake=may_wake):
            raise self._late()
        found = protocol.receive_answer(connected)
        if found is None:
            raise ServerGone
        return found

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

    def _late(self) -> DeadlineError:
        return DeadlineError(
            f"the inference server of this host did not answer within {self.serving.timeout_s:g} s:"
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
            ServerGone, DeadlineError, Woken: see :class:`Link`.
            PolicyError: the policy can't be called with such observations.
        """
        self._link = link
        self._number = 0
        self._num_rows, self._observation = caller.num_rows, caller.observation
        self.outputs: Arrays | None = None
        self.extras: tuple[Leaf, ...] = ()
        self._answers: dict[int, tuple[Answer, Failure | None]] = {}  # by number
        self._socket = link.connect(deadline)
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
        try:
            protocol.send_request(self._socket, request, content)
        except ConnectionError:
            raise ServerGone from None
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
            answer, fds = self._link.answer(self._socket, deadline, may_wake=may_wake)
            failure = None
            if answer.status == Status.FAILED:
                failure = protocol.unpacked(*fds)
            elif fds:
                self._map(*fds)
            self._answers[answer.number] = answer, failure
        answer, failure = self._answers[number]
        self._answers = {n: each for n, each in self._answers.items() if n in others}
        if failure is not None:
            raise failure.passed_on()
        return answer

    def _map(self, content: int, memory: int) -> None:
        """Map the memory that came with an answer: of the inputs first, then of the outputs."""
        try:
            told = protocol.unpacked(content)
        except BaseException:
            os.close(memory)
            raise
        if isinstance(told, Served):
            self.served = told
            self._link.server = told.worker_id
            self._link.weights.layout = told.weights
            leaves = (*self._observation, STREAM, *told.inputs)
            self.inputs = protocol.map_memory(memory, leaves, self._num_rows)
        else:
            action, self.extras = told
            leaves = (*action, *self.extras, *(self.served.state or ()))
            self.outputs = protocol.map_memory(memory, leaves, self._num_rows)

    def close(self) -> None:
        """Ask for nothing more."""
        self._socket.close()
