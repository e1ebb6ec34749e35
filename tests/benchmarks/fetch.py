"""How fast a rollout of 64 MB moves between two processes: by distcollect, and by torch alone.

A second process holds the tensors. This one fetches them over and over into memory of its own (new
memory each time, except for Gloo), and nothing else happens meanwhile. No way of transfer polls
while idle, which excludes torch's ``shm`` transport. Values are GB/s.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed
import torch.distributed.rpc  # noqa: TID251 - torch alone is measured too

from distcollect.common.shared_memory import sample_of_memory
from distcollect.net.messages import PeerAddress
from distcollect.rollout.header import Header
from distcollect.rollout.layout import Layout, Tensors
from distcollect.rollout.slab import Slab
from distcollect.rollout.spaces import Leaf
from distcollect.transport.protocol import CollectRequest
from distcollect.transport.rpc import RpcTransport
from distcollect.transport.rpc_server import RpcServer

# Torch declares no types for much of what is used here.
dist: Any = torch.distributed
rpc: Any = torch.distributed.rpc  # noqa: TID251

Values: TypeAlias = "dict[str, float]"

LOOPBACK = "127.0.0.1"
_ROWS, _STEPS = 16, 148  # of 84x84x4 bytes: 67 MB
_PIECES = 8
_TIMEOUT_S = 60.0
_WARM_UP = 3
_ENOUGH = 5  # fetches, at least


def rollout(*, shared: bool = False) -> Tensors:
    """A rollout of Atari frames as a worker holds it; ``shared``: its host's trainer can map it."""
    layout = Layout(
        num_envs=_ROWS,
        state=(Leaf(("observation",), (4, 84, 84), torch.uint8),),
        action=(Leaf(("action",), (), torch.int64),),
        extras=(Leaf(("action_log_prob",), (), torch.float32),),
    )
    slab = Slab(layout, _STEPS, shared=shared)
    slab.root["observation",].fill(7)
    return slab.tensors()


def pieces() -> Tensors:
    """The same number of bytes in 8 equal tensors, which RPC moves side by side."""
    size = sum(tensor.nbytes for tensor in rollout()) // _PIECES
    return [torch.full((size,), 7, dtype=torch.uint8) for _ in range(_PIECES)]


def run_distcollect(seconds: float, *, mapped: bool) -> Values:
    """``Offer.fetch`` of distcollect; ``mapped``: from memory that both map, otherwise over RPC."""
    with other_process(_serve_distcollect) as pipe:
        transport = RpcTransport(LOOPBACK)
        endpoint, sample = received(pipe)
        transport.connect(1, PeerAddress(endpoint, sample if mapped else None))
        took: list[float] = []
        num_bytes = 0

        def fetch() -> None:
            nonlocal num_bytes
            begin = time.perf_counter()
            offer = transport.collect(1, CollectRequest(_STEPS)).result(_TIMEOUT_S)
            tensors = offer.fetch().result(_TIMEOUT_S)
            took.append(time.perf_counter() - begin)
            num_bytes = sum(tensor.nbytes for tensor in tensors)

        _repeat(fetch, seconds)
        pipe.send("bye")
        transport.close()
    return {"gb_per_s": num_bytes * (len(took) - _WARM_UP) / sum(took[_WARM_UP:]) / 1e9}


def run_rpc_channel(seconds: float, channel: str) -> Values:
    """``RRef.to_here()`` over the ``uv`` transport and one channel, in whole and in 8 pieces."""
    with (
        tempfile.TemporaryDirectory() as folder,
        other_process(_serve_rpc, folder, channel) as pipe,
    ):
        _join_rpc(0, folder, channel)
        rates = []
        for form in (rollout, pieces):
            rref = rpc.remote("member1", form)
            num_bytes = sum(tensor.nbytes for tensor in rref.to_here(_TIMEOUT_S))
            rates.append(_gb_per_s(partial(rref.to_here, _TIMEOUT_S), num_bytes, seconds))
        pipe.send("bye")
    return {"gb_per_s": max(rates), "whole_gb_per_s": rates[0], "in_8_gb_per_s": rates[1]}


def run_gloo(seconds: float) -> Values:
    """``recv`` of Gloo into the same memory each time."""
    target = torch.zeros(sum(tensor.nbytes for tensor in rollout()), dtype=torch.uint8)
    with tempfile.TemporaryDirectory() as folder, other_process(_serve_gloo, folder) as pipe:
        group = _join_gloo(0, folder)

        def fetch() -> None:
            pipe.send("next")
            group.recv([target], 1, 0).wait()

        rate = _gb_per_s(fetch, target.nbytes, seconds)
        pipe.send("bye")
    return {"gb_per_s": rate}


def run_shared_memory(seconds: float) -> Values:
    """Tensors in shared memory, sent by torch.multiprocessing and copied to private memory."""
    context = torch.multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    with other_process(_serve_shared, queue) as pipe:
        tensors = queue.get()
        num_bytes = sum(tensor.nbytes for tensor in tensors)

        def fetch() -> None:
            pipe.send("next")  # every other way has a round trip too
            received(pipe)
            _ = [tensor.clone() for tensor in tensors]

        rate = _gb_per_s(fetch, num_bytes, seconds)
        pipe.send("bye")
    return {"gb_per_s": rate}


def _repeat(fetch: Callable[[], object], seconds: float) -> tuple[int, float]:
    """(number of fetches, seconds they took), without the first few."""
    for _ in range(_WARM_UP):
        fetch()
    begin, count = time.perf_counter(), 0
    while count < _ENOUGH or time.perf_counter() - begin < seconds:
        fetch()
        count += 1
    return count, time.perf_counter() - begin


def _gb_per_s(fetch: Callable[[], object], num_bytes: int, seconds: float) -> float:
    count, elapsed = _repeat(fetch, seconds)
    return num_bytes * count / elapsed / 1e9


@contextmanager
def other_process(serve: Callable[..., None], *args: Any) -> Iterator[Any]:
    """Run ``serve(pipe, *args)`` in another process; yields the other end of the pipe."""
    context = torch.multiprocessing.get_context("spawn")
    ours, theirs = multiprocessing.Pipe()
    process = context.Process(target=serve, args=(theirs, *args), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
        process.join(_TIMEOUT_S)
    finally:
        if process.is_alive():
            process.kill()
            process.join()


def received(pipe: Any) -> Any:
    """The other process's next message; raises TimeoutError after a minute."""
    if not pipe.poll(_TIMEOUT_S):
        raise TimeoutError(f"the other process said nothing for {_TIMEOUT_S:g} s")
    return pipe.recv()


class _Source:
    """A worker's service that always offers the same rollout."""

    worker_id = 0
    service_methods = frozenset({"collect"})

    def __init__(self) -> None:
        self._tensors = {shared: rollout(shared=shared) for shared in (False, True)}
        num_bytes = sum(tensor.nbytes for tensor in self._tensors[False])
        self._header = Header(0, 0, 0, _ROWS * _STEPS, _STEPS, num_bytes, (0, 0))

    def collect(self, request: CollectRequest) -> Future[tuple[Header, Tensors]]:
        done: Future[tuple[Header, Tensors]] = Future()
        done.set_result((self._header, self._tensors[request.shared]))
        return done


def _serve_distcollect(pipe: Any) -> None:
    pipe.send((RpcServer(_Source(), LOOPBACK).endpoint, sample_of_memory()))
    pipe.recv()
    os._exit(0)


def _join_rpc(rank: int, folder: str, channel: str) -> None:
    os.environ["TP_SOCKET_IFNAME"] = "lo"
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{folder}/store",
        rpc_timeout=_TIMEOUT_S,
        _transports=["uv"],
        _channels=[channel],
    )
    rpc.init_rpc(f"member{rank}", rank=rank, world_size=2, rpc_backend_options=options)


def _serve_rpc(pipe: Any, folder: str, channel: str) -> None:
    _join_rpc(1, folder, channel)
    pipe.recv()
    os._exit(0)


def _join_gloo(rank: int, folder: str) -> Any:
    store = dist.FileStore(f"{folder}/store", 2)
    kind = dist.ProcessGroupGloo
    options = kind._Options()
    options._devices = [kind.create_device(hostname=LOOPBACK)]
    return kind(store, rank, 2, options)


def _serve_gloo(pipe: Any, folder: str) -> None:
    source = torch.full((sum(tensor.nbytes for tensor in rollout()),), 7, dtype=torch.uint8)
    group = _join_gloo(1, folder)
    while pipe.recv() == "next":
        group.send([source], 0, 0).wait()


def _serve_shared(pipe: Any, queue: Any) -> None:
    tensors = pieces()
    for tensor in tensors:
        tensor.share_memory_()  # type: ignore[no-untyped-call]
    queue.put(tensors)
    while pipe.recv() == "next":
        pipe.send("here")
