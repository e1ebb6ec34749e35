"""A backend of process groups that stands in for NCCL where there is no GPU.

It is registered with torch.distributed, and has what is awkward in NCCL:

- it refuses tensors that are not dense and on its kind of device, with a ValueError;
- it connects the members in the first broadcast, which waits for all of them without an end, and
  which no abort ends;
- it refuses two members on one device;
- a member that dies is not noticed: the others wait until their group is aborted;
- what was aborted looks as if it was completed, and memory may be half written;
- an aborted group can't be used again.

Its device is the CPU, and its data goes through sockets of this host. How NCCL really behaves is
known only after a run on GPUs.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

dist: Any = torch.distributed

NAME = "nccl_stand_in"
HOST = "127.0.0.1"
# What the device of this process is called; None: each member has one of its own.
DEVICE_VARIABLE = "NCCL_STAND_IN_DEVICE"
# Names a file. The sender sends half of each payload, creates it, and waits until it is gone.
HALFWAY_VARIABLE = "NCCL_STAND_IN_HALFWAY"
_CHUNK = 1 << 16


def register() -> None:
    """Register it in this process; to be called in workers too, for example as init_fn."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, StandInGroup, devices=["cpu"])


class StandInWork(dist._Work):
    """A broadcast under way."""

    def __init__(self) -> None:
        super().__init__()
        self._ended = threading.Event()

    def end(self) -> None:
        self._ended.set()

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._ended.wait(None if timeout is None else timeout.total_seconds())
        return True


class StandInGroup(dist.ProcessGroup):
    """A process group; only what broadcasts of weights need."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._store, self._rank, self._size = store, rank, size
        self._links: list[socket.socket] | None = None  # rank 0: to all others; others: to rank 0
        self._aborted = threading.Event()

    def getBackendName(self) -> str:  # noqa: N802 - the name that torch has
        return NAME

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> StandInWork:
        [flat] = tensors
        if flat.device.type != "cpu" or flat.is_sparse or not flat.is_contiguous():
            raise ValueError("Tensors must be on the CPU, dense and contiguous")
        if self._links is None:
            self._links = self._connect()
            if self._aborted.is_set():
                _close(self._links)
        if self._aborted.is_set():
            raise RuntimeError(f"the communicator was aborted on rank {self._rank}")
        work = StandInWork()
        threading.Thread(target=self._move, args=(flat, work), daemon=True).start()
        return work

    def abort(self) -> None:
        self._aborted.set()
        _close(self._links or ())

    def _connect(self) -> list[socket.socket]:
        links: list[socket.socket] = []
        try:
            self._connect_all(links)
        except BaseException:
            _close(links)
            raise
        return links

    def _connect_all(self, links: list[socket.socket]) -> None:
        device = os.environ.get(DEVICE_VARIABLE, f"device {self._rank}")
        if self._rank:
            port = int(self._store.get("port"))  # waits for rank 0 as long as the store allows
            links.append(socket.create_connection((HOST, port)))
            links[0].sendall(device.encode().ljust(64))
            with _waiting(links[0]):
                duplicates = _exactly(links[0], 1) == b"!"
        else:
            with socket.create_server((HOST, 0)) as server, _waiting(server):
                self._store.set("port", str(server.getsockname()[1]))
                for _ in range(1, self._size):
                    links.append(server.accept()[0])  # noqa: PERF401 - closed if the next fails
            devices = [device, *(_exactly(link, 64).strip().decode() for link in links)]
            duplicates = len({*devices}) < self._size
            for link in links:
                link.sendall(b"!" if duplicates else b".")
        if duplicates:
            raise RuntimeError(f"Duplicate GPU detected: rank {self._rank} is on {device}")

    def _move(self, flat: torch.Tensor, work: StandInWork) -> None:
        try:
            if self._rank == 0:
                self._send(memoryview(flat.numpy()))
            else:
                assert self._links is not None
                _receive(self._links[0], memoryview(flat.numpy()))
        except OSError:
            self._aborted.wait()  # a member is gone: as if nothing had happened
        work.end()

    def _send(self, data: memoryview) -> None:
        assert self._links is not None
        half = len(data) // 2
        for link in self._links:
            link.sendall(data[:half])
        if path := os.environ.get(HALFWAY_VARIABLE):
            with open(path, "x"):  # noqa: PTH123
                pass
            while os.path.exists(path) and not self._aborted.wait(0.01):  # noqa: PTH110
                pass
            if self._aborted.is_set():
                return
        for link in self._links:
            link.sendall(data[half:])


def end_waiting() -> None:
    """End what still waits for other members to be connected, so that a test leaves no thread."""
    for link in list(_connecting):
        with contextlib.suppress(OSError):
            link.shutdown(socket.SHUT_RDWR)


_connecting: set[socket.socket] = set()


@contextlib.contextmanager
def _waiting(link: socket.socket) -> Iterator[None]:
    _connecting.add(link)
    try:
        yield
    finally:
        _connecting.discard(link)


def _close(links: Iterable[socket.socket]) -> None:
    for link in links:
        with contextlib.suppress(OSError):
            link.shutdown(socket.SHUT_RDWR)
        link.close()


def _exactly(link: socket.socket, num_bytes: int) -> bytes:
    data = bytearray(num_bytes)
    _receive(link, memoryview(data))
    return bytes(data)


def _receive(link: socket.socket, into: memoryview) -> None:
    while into:
        got = link.recv_into(into[:_CHUNK])
        if not got:
            raise ConnectionError("the other end was closed")
        into = into[got:]
