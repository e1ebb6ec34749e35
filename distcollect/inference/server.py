"""An inference server: computes the actions of all its workers, on its main thread.

Weights arrive on another thread. They are swapped in between two forward passes only, so all rows
of one pass have actions of the same version.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import secrets
import selectors
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from distcollect.common import tensor_cache
from distcollect.common.clock import clock_ns
from distcollect.common.step_counter import StepCounter, Task
from distcollect.inference import protocol
from distcollect.inference.batching import Batching
from distcollect.inference.protocol import STREAM, Answer, Caller, Kind, Request, Served, Serving
from distcollect.net.framing import Packet
from distcollect.net.server import Connection
from distcollect.policy.base import Exploration
from distcollect.policy.live_weights import LiveWeights, buffers_restored
from distcollect.policy.per_env_rng import PerEnvRng
from distcollect.policy.recurrent import IS_INIT
from distcollect.policy.user import UserPolicy
from distcollect.rollout.spaces import Arrays, leaves_of
from distcollect.transport import packing
from distcollect.transport.failure import Failure


class _Group:
    """Callers whose rows can be computed together.

    Attributes:
        caller: one of them.
        most: rows in a forward pass at most.
        observation: the arrays that the policy reads, of so many rows.
    """

    def __init__(self, caller: Caller, most: int, policy: Callable[..., Any]) -> None:
        self.caller = caller
        self.most = most
        self.observation = protocol.own_arrays(caller.observation, most)
        self._policy = policy
        self._by_size: dict[int, UserPolicy] = {}

    def policy(self, num_rows: int) -> UserPolicy:
        """The policy, bound to the first rows of the arrays."""
        if num_rows not in self._by_size:
            caller = self.caller
            policy = self._by_size[num_rows] = UserPolicy(
                self._policy,
                {key: array[:num_rows] for key, array in self.observation.items()},
                caller.observation_space,
                caller.action_space,
                exploration=Exploration(caller.exploration),
            )
            policy.noises = ()  # the workers add it
        return self._by_size[num_rows]

    def is_for(self, other: Caller) -> bool:
        """Return True if that caller's rows can be computed with these."""
        return replace(other, worker_id=self.caller.worker_id) == self.caller


@dataclass(eq=False)
class _Client:
    """A connected worker.

    Attributes:
        socket: to it; None: it is on another host.
        group: what it belongs to; known from its hello on.
        num_rows: of its memory.
        place: of its first row in a forward pass after a seed. Where a row stands may change the
            last bits of what is computed for it.
        inputs, outputs: see :class:`.link.Connection`.
        untold: leaves and descriptor of the outputs, until it is told of them.
        halves: the first rows of its requests for actions.
    """

    socket: socket.socket | None = None
    group: _Group = field(init=False)
    num_rows: int = 0
    place: int = 0
    inputs: Arrays = field(default_factory=dict)
    outputs: Arrays | None = None
    untold: tuple[object, int] | None = None
    halves: set[int] = field(default_factory=set)

    def answer(
        self, request: Request, answer: Answer, content: object = None, memory: int | None = None
    ) -> None:
        """Send an answer; see :func:`.protocol.send`."""
        assert self.socket is not None
        with contextlib.suppress(OSError):  # it has ended: that is received, too
            protocol.send(self.socket, answer, content, memory)


@dataclass(eq=False)
class _RemoteClient(_Client):
    """A worker on another host. It gets the packets of its connection, on the thread of that.

    Attributes:
        connection: with it.
        server: that it asks.
    """

    connection: Connection = field(kw_only=True)
    server: InferenceServer = field(kw_only=True)

    allocate = staticmethod(tensor_cache.block)

    def received(self, packet: Packet) -> None:
        self.server.post(partial(self.server.receive_packet, self, packet))

    def ended(self) -> None:
        self.server.post(partial(self.server.part, self))

    def answer(
        self, request: Request, answer: Answer, content: object = None, memory: int | None = None
    ) -> None:
        arrays: Arrays = {}
        if not isinstance(content, Failure):
            arrays = (self.outputs or {}) if request.kind == Kind.CHOOSE else self.inputs
        # Copied, as they are on their way for longer than this call.
        results = [array[request.rows].copy() for array in arrays.values()]
        packet = Packet(0, packing.pack((request, answer, content, results)))
        with contextlib.suppress(OSError):  # it has ended: that is received, too
            self.connection.send_packet(packet)


@dataclass(frozen=True)
class _Waiting:
    """A request for actions that was not answered yet, and when it came."""

    client: _Client
    request: Request
    since: int


class InferenceServer:
    """Serves workers. Its thread calls :meth:`serve`, others :meth:`ring` and :meth:`post`.

    Attributes:
        name: of its socket.
    """

    def __init__(
        self,
        serving: Serving,
        policy: Callable[..., Any],
        weights: LiveWeights,
        counter: StepCounter,
        jobs: queue.SimpleQueue[Callable[[], object] | None],
        *,
        worker_id: int,
        num_cores: int,
    ) -> None:
        """Take connections from now on; they are answered in :meth:`serve`.

        Args:
            serving: for whom.
            policy: the policy, on its device.
            weights: its weights.
            counter: says what the process does.
            jobs: what its thread is to do besides; :meth:`ring` tells of a new one.
            worker_id: the process's slot.
            num_cores: that it and its workers may keep busy.
        """
        self._serving, self._policy, self._weights = serving, policy, weights
        self._counter, self._worker_id, self._num_cores = counter, worker_id, num_cores
        self._jobs = jobs
        self._served: set[int] = set()  # the ids of all workers of this host that have been here
        self._groups: list[_Group] = []
        self._clients: set[_Client] = set()
        # By client and first row, the oldest first.
        self._waiting: dict[tuple[_Client, int], _Waiting] = {}
        self._batching = Batching()
        self._version = 0  # with which it was last looked which requests can be answered
        self._bell, self._ringer = socket.socketpair()
        self._bell.setblocking(False)
        self._ringer.setblocking(False)
        self.name = f"@distcollect-{secrets.token_hex(16)}"
        self._listening = protocol.open_socket()
        self._listening.bind(protocol.address_of(self.name))
        self._listening.listen(socket.SOMAXCONN)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listening, selectors.EVENT_READ, self._accept)
        self._selector.register(self._bell, selectors.EVENT_READ, partial(self._bell.recv, 4096))

    def ring(self) -> None:
        """There are jobs to do, or new weights."""
        with contextlib.suppress(OSError):  # it is full, or it was closed
            self._ringer.send(b"!")

    def post(self, work: Callable[[], object]) -> None:
        """Have the thread that serves do this next."""
        self._jobs.put(work)
        self.ring()

    def close(self) -> None:
        """Take leave of all workers."""
        for client in list(self._clients):
            self.part(client)
        self._selector.close()
        for each in (self._listening, self._bell, self._ringer):
            each.close()

    def serve(self) -> None:
        """Answer until there is a None among the jobs, which are done between two answers."""
        while True:
            self._swap_weights()
            wait_ns = self._batching.wait_ns(clock_ns())
            for key, _ in self._selector.select(None if wait_ns is None else wait_ns / 1e9):
                key.data()
            with contextlib.suppress(queue.Empty):
                while (job := self._jobs.get_nowait()) is not None:
                    job()
                self._jobs.put(None)  # the end is for the caller, too
                return
            self._swap_weights()
            if self._batching.wait_ns(clock_ns()) == 0:
                self._launch()

    def _swap_weights(self) -> None:
        if self._weights.pending:
            self._weights.apply()
        if self._version != self._weights.version:
            self._version = self._weights.version
            for each in self._waiting.values():  # some may have waited for this version
                self._is_asked(each)

    def _is_asked(self, waiting: _Waiting) -> None:
        if waiting.request.least <= self._weights.version:
            self._batching.asked((waiting.client, waiting.request.first), waiting.since)

    # Connections.

    def _accept(self) -> None:
        connected, _ = self._listening.accept()
        if not protocol.is_same_user(connected):
            connected.close()
            return
        client = _Client(connected)
        self._clients.add(client)
        self._selector.register(connected, selectors.EVENT_READ, partial(self._receive, client))

    def meet(self, connection: Connection) -> None:
        """Take a connection with a worker on another host; on any thread."""
        connection.carry(_RemoteClient(connection=connection, server=self))

    def part(self, client: _Client) -> None:
        """A worker has ended, or is to."""
        self._clients.discard(client)
        for first in client.halves:
            self._batching.gone((client, first))
            self._waiting.pop((client, first), None)
        if client.socket is not None:
            self._selector.unregister(client.socket)
            client.socket.close()

    def _receive(self, client: _Client) -> None:
        assert client.socket is not None
        found = protocol.receive(client.socket, Request)
        if found is None:
            self.part(client)
        else:
            request, fds = found
            self._handle(client, request, lambda: protocol.unpacked(*fds) if fds else None)

    def receive_packet(self, client: _Client, packet: Packet) -> None:
        """Handle the request of a worker on another host."""
        request, content, arrays = packing.unpack(packet.parts)

        def read() -> Any:
            for array, sent in zip(client.inputs.values(), arrays, strict=True):
                array[request.rows] = sent
            return pickle.loads(content) if content else None

        self._handle(client, request, read)

    def _handle(self, client: _Client, request: Request, read: Callable[[], Any]) -> None:
        """Handle a request; ``read`` returns the content that came with it."""
        try:
            content = read()
            if request.kind == Kind.HELLO:
                self._meet(client, request, content)
            elif request.kind == Kind.BEGIN:
                self._begin(client, request)
            else:
                self._choose(_Waiting(client, request, clock_ns()))
        except Exception as error:  # noqa: BLE001 - the worker raises it
            self._fail(client, request, error)

    def _choose(self, new: _Waiting) -> None:
        client, first = new.client, new.request.first
        for half in client.halves:  # the worker doesn't wait any more for what has the same rows
            old = self._waiting.get((client, half))
            if old is not None and old.request.overlaps(new.request):
                del self._waiting[client, half]
                self._batching.gone((client, half))
        client.halves.add(first)
        self._waiting[client, first] = new
        self._is_asked(new)

    def _meet(self, client: _Client, request: Request, caller: Caller) -> None:
        """Tell a worker what it has to know of the policy."""
        group = next((each for each in self._groups if each.is_for(caller)), None)
        if group is None:
            all_rows = self._serving.num_workers * caller.num_rows
            most = max(self._serving.batch_size or all_rows, caller.num_rows)
            group = _Group(caller, most, self._policy)
            self._groups.append(group)
        with self._counter.doing(Task.SERVE):
            state = group.policy(caller.num_rows).state
        served = Served(self._worker_id, self._weights.layout, None)
        if state is not None:
            has_is_init, at_root = IS_INIT in state.leaves, tuple(state.at_root)
            served = replace(served, state=state.entries, has_is_init=has_is_init, at_root=at_root)
        client.group, client.num_rows = group, caller.num_rows
        if client.socket is not None:
            self._served.add(caller.worker_id)
        num_free = self._num_cores - len(self._served)
        torch.set_num_threads(self._serving.num_threads or max(1, num_free))
        client.place = caller.worker_id % (group.most // caller.num_rows) * caller.num_rows
        leaves = (*caller.observation, STREAM, *served.inputs)
        memory, client.inputs = protocol.make_memory(leaves, caller.num_rows)
        try:
            client.answer(request, Answer(request.number), served, memory)
        finally:
            os.close(memory)

    def _begin(self, client: _Client, request: Request) -> None:
        """Write the state at the start of episodes to a worker's inputs, of all of its rows."""
        policy = client.group.policy(client.num_rows)
        assert policy.state is not None
        rng = PerEnvRng(client.inputs[STREAM.key]) if request.drawn >= 0 else None
        if rng is not None:
            rng.num_drawn = request.drawn
        policy.draw_from(rng)
        with self._computing(client.group), policy.exploring():
            initial = policy.state.initial()
        for key, value in initial.items():
            client.inputs[key][:] = value
        drawn = -1 if rng is None else rng.num_drawn
        client.answer(request, Answer(request.number, self._weights.version, drawn))

    def _fail(self, client: _Client, request: Request, error: Exception) -> None:
        failure = Failure.of(error, self._worker_id)
        client.answer(request, Answer(request.number), failure)

    # Forward passes.

    def _launch(self) -> None:
        """Compute what waits, as far as it fits into one pass: first what has waited longest."""
        batch = self._next_batch()
        requests = [each for each, _ in batch]
        group, is_seeded = requests[0].client.group, requests[0].request.drawn >= 0
        num_rows = sum(each.request.num_rows for each in requests)
        num_computed = group.most if is_seeded else self._padded(num_rows, group.most)
        begin = clock_ns()
        try:
            with self._computing(group):
                drawn = self._compute(batch, num_computed)
        except Exception as error:  # noqa: BLE001 - the workers raise it
            for each in requests:
                self._fail(each.client, each.request, error)
        else:
            version, took = self._weights.version, clock_ns() - begin
            for each in requests:
                number, queued = each.request.number, begin - each.since
                answer = Answer(number, version, drawn, queued, took, num_rows, num_computed)
                leaves, memory = each.client.untold or (None, None)
                each.client.answer(each.request, answer, leaves, memory)
                if memory is not None:
                    os.close(memory)
                    each.client.untold = None
        now = clock_ns()
        callers = [(each.client, each.request.first) for each in requests]
        self._batching.answered(callers, now, now - begin)

    @contextlib.contextmanager
    def _computing(self, group: _Group) -> Iterator[None]:
        module = self._weights.module if group.caller.for_evaluation else None
        with self._counter.doing(Task.SERVE), buffers_restored(module):
            yield

    def _next_batch(self) -> list[tuple[_Waiting, slice]]:
        """Take requests that one pass can answer out of those that wait, with their rows in it."""
        may = [w for w in self._waiting.values() if w.request.least <= self._weights.version]
        group, is_seeded = may[0].client.group, may[0].request.drawn >= 0
        taken = np.zeros(group.most, bool)
        batch = []
        for each in may:
            client, request = each.client, each.request
            if client.group is group and (request.drawn >= 0) == is_seeded:
                begin = client.place + request.first if is_seeded else int(taken.sum())
                rows = slice(begin, begin + request.num_rows)
                if rows.stop <= group.most and not taken[rows].any():
                    taken[rows] = True
                    batch.append((each, rows))
                    del self._waiting[client, request.first]
        return batch

    def _padded(self, num_rows: int, most: int) -> int:
        """How many rows to compute for so many: on a GPU one of a few numbers."""
        if self._weights.device.type == "cpu":
            return num_rows
        return min(most, 1 << (num_rows - 1).bit_length())

    def _compute(self, batch: list[tuple[_Waiting, slice]], num_computed: int) -> int:
        """Write to the workers' outputs; how many random numbers each row has drawn by now."""
        first = batch[0][0]
        group, policy = first.client.group, first.client.group.policy(num_computed)
        arrays = {**group.observation, **(policy.state.arrays if policy.state else {})}
        rng = None
        if first.request.drawn >= 0:
            arrays[STREAM.key] = np.zeros(num_computed, np.uint64)
        for key, array in arrays.items():
            # As padding, what a policy can work with.
            array[:num_computed] = first.client.inputs[key][first.request.first]
            for each, rows in batch:
                array[rows] = each.client.inputs[key][each.request.rows]
        if first.request.drawn >= 0:
            rng = PerEnvRng(arrays[STREAM.key])
        policy.draw_from(rng)
        with policy.exploring():
            actions, extras = policy()
        entries = policy.state.entries if policy.state else ()
        results = [*actions, *extras, *(arrays[leaf.key] for leaf in entries)]
        for each, rows in batch:
            if each.client.outputs is None:
                self._make_outputs(each.client, policy)
            assert each.client.outputs is not None
            for target, result in zip(each.client.outputs.values(), results, strict=True):
                target[each.request.rows] = result[rows]
        return -1 if rng is None else rng.num_drawn

    def _make_outputs(self, client: _Client, policy: UserPolicy) -> None:
        action = leaves_of(client.group.caller.action_space, "action")
        state = policy.state.entries if policy.state else ()
        leaves = (*action, *policy.extras, *state)
        memory, client.outputs = protocol.make_memory(leaves, client.num_rows)
        client.untold = (action, policy.extras), memory
