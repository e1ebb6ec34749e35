"""A small service for the transports' contract suite, and what serves it in another process."""

from __future__ import annotations

import contextlib
import functools
import pickle
import threading
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any

import torch

from distcollect.common.shared_memory import (
    SharedTensor,
    SharedTensors,
    allocate,
    sample_of_memory,
)
from distcollect.errors import RolloutGone
from distcollect.net.client import ControlConnection, join
from distcollect.net.messages import TrainerAddress, WorkerHello
from distcollect.rollout.header import Header
from distcollect.rollout.layout import Tensors
from distcollect.transport.protocol import CollectRequest, methods_of
from distcollect.transport.tcp_server import TcpServer
from distcollect.worker.peer_listener import PeerListener

WORKER_ID = 7


@functools.lru_cache(maxsize=4)
def rollout(num_steps: int) -> Tensors:
    """The tensors of a rollout with so many steps: one for each dtype, some empty."""
    drawn = torch.Generator().manual_seed(num_steps)
    numbers = torch.randint(0, 256, (num_steps,), generator=drawn)
    dtypes = (torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int16, torch.int32)
    return [
        numbers.to(torch.float32).view(1, -1),
        numbers.to(torch.float64) / 3,
        *map(numbers.to, dtypes),
        numbers * 2**40,
        numbers % 2 == 0,
        torch.zeros(0, 3),
        torch.zeros(2, 0, dtype=torch.bool),
        torch.tensor(3.5, dtype=torch.float64),
    ]


@functools.lru_cache(maxsize=1)
def in_one_tensor(num_bytes: int) -> Tensors:
    """A rollout of so many bytes as workers send it: all leaves in one tensor, in old memory."""
    return [torch.ones(num_bytes, dtype=torch.uint8)]


def in_shared_memory(tensors: Tensors) -> tuple[SharedTensors, torch.Tensor]:
    """Copy tensors to memory that others can map; return what is sent, and the memory."""
    memory, segment = allocate(sum(tensor.nbytes + 8 for tensor in tensors))
    places, end = [], 0
    for tensor in tensors:
        places.append(SharedTensor(segment, end, tuple(tensor.shape), tensor.dtype))
        places[-1].within(memory).copy_(tensor)
        end += -(-tensor.nbytes // 8) * 8
    return SharedTensors(segment.name, end, pickle.dumps(places)), memory


class Service:
    """Answers at once, later, or with an error."""

    worker_id = WORKER_ID

    def __init__(self) -> None:
        self._owed: dict[str, Future[Any]] = {}
        self._lock = threading.Lock()
        self._kept: dict[str, tuple[Tensors, Future[bool]]] = {}
        self.collected = 0
        self._memory: list[torch.Tensor] = []

    @property
    def service_methods(self) -> frozenset[str]:
        return methods_of(Service) - {Service.not_served.__name__}

    def echo(self, *args: Any) -> Any:
        return args

    def fail(self, message: str) -> None:
        raise ValueError(message)

    def fail_later(self, message: str) -> Future[Any]:
        answer: Future[Any] = Future()

        def deep_inside() -> None:
            try:
                self.fail(message)
            except ValueError as error:
                answer.set_exception(error)

        threading.Thread(target=deep_inside).start()
        return answer

    def later(self, key: str) -> Future[Any]:
        with self._lock:
            return self._owed.setdefault(key, Future())

    def lock(self) -> Any:
        """Pickle can't take it."""
        return self._lock

    def not_served(self) -> None:
        """Not among the methods that others may call."""

    def soon(self, value: Any) -> Future[Any]:
        """Answer after half a second, when the caller does something else."""
        answer: Future[Any] = Future()
        threading.Timer(0.5, answer.set_result, (value,)).start()
        return answer

    def release(self, key: str, value: Any) -> None:
        self.later(key).set_result(value)

    def num_rrefs(self) -> tuple[int, int]:
        """By torch's own count: the RRefs that this process owns, and how many holds there are."""
        counts = torch._C._distributed_rpc._rref_context_get_debug_info()  # type: ignore[attr-defined]
        return int(counts["num_owner_rrefs"]), int(counts["num_forks"])

    def hand_over(self, sequence: int, key: str, keep_s: float) -> None:
        """Keep a rollout of this many steps."""
        self._kept[key] = rollout(sequence), Future()

    def handover_outcome(self, key: str) -> Future[bool]:
        return self._kept[key][1]

    def read_handover(self, key: str, mapped: bool) -> Tensors:
        tensors, outcome = self._kept[key]
        if outcome.done():
            raise RolloutGone("it was taken already")
        outcome.set_result(True)
        return tensors

    def collect(self, request: CollectRequest) -> tuple[Header, list[Any]]:
        if request.random:
            raise RuntimeError("no rollout today")
        steps = request.num_steps
        tensors = in_one_tensor(request.frames) if request.frames else rollout(steps)
        self.collected += 1
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        header = Header(WORKER_ID, 0, self.collected, steps, steps, num_bytes, (3, 5))
        if not request.shared:
            return header, tensors
        shared, memory = in_shared_memory(tensors)
        self._memory.append(memory)
        return header, [shared]


def serve_rpc(parent: Connection, channels: list[str]) -> None:
    """Serve until the parent ends."""
    from distcollect.transport import rpc_agents, rpc_server  # noqa: PLC0415 - torch may lack it

    rpc_agents.CHANNELS = channels
    endpoint = rpc_server.RpcServer(Service(), "127.0.0.1").endpoint
    parent.send((endpoint, sample_of_memory()))
    with contextlib.suppress(EOFError):
        parent.recv()


def serve_tcp(parent: Connection, port: int, token: str) -> None:
    """Serve a trainer until it is gone."""
    connection = ControlConnection("127.0.0.1", port, 10)
    connection.join(WorkerHello(worker_id=WORKER_ID, incarnation=0), token)
    service = Service()
    TcpServer(service, connection)
    endpoint = PeerListener(connection, token, functools.partial(TcpServer, service)).endpoint
    parent.send((endpoint, sample_of_memory()))
    connection.receive()


def serve_many(parent: Connection, port: int, token: str, number: int) -> None:
    """Serve a trainer as so many workers that need a thread each and nothing else."""

    def serve() -> None:
        hello = WorkerHello(worker_id=WORKER_ID, incarnation=0)
        connection, _ = join(
            lambda: TrainerAddress("127.0.0.1", port, token), hello, 60, name="a light worker"
        )
        TcpServer(Service(), connection)
        connection.receive()

    threads = [threading.Thread(target=serve) for _ in range(number)]
    parent.send("ready")
    parent.recv()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
