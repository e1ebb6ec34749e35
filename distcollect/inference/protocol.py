"""What a worker and an inference server say to each other.

On one host they have a Unix socket, whose messages are small and keep their bounds, and memory that
both map::

    worker                                  server
    HELLO (spaces, rows)      ─────────▶
                              ◀─────────    answer (what the policy is; memory for the rows)
    BEGIN, CHOOSE (which rows) ────────▶
                              ◀─────────    answer, or a Failure

A request reads the rows that the worker has written to the memory before, and its answer says that
the results lie there. The server keeps nothing from one request to the next: observation, state of
a recurrent policy and random numbers of each row come with it. So a request can be sent again, to
the process that replaces a server.

Between hosts the same messages are packets of a connection that has proven the run's token, and a
request's rows, and its results, are in them.

The socket has an abstract name, so it needs no file. Each server has a new one, which the trainer
tells workers: who takes that of one that has ended holds up nobody. Either side learns of the
other's end by the socket.
"""

from __future__ import annotations

import enum
import math
import mmap
import os
import pickle
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from distcollect.common.by_value import Pickler
from distcollect.common.memory_segment import memory_file, small_file
from distcollect.policy.recurrent import IS_INIT
from distcollect.policy.weight_layout import WeightLayout
from distcollect.rollout.spaces import Arrays, Key, Leaf

# uint64: where the random numbers of a row go on, after a seed.
STREAM = Leaf(("\0stream",), (), torch.uint64)

_ALIGNMENT = 64
_PEER_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True)
class Serving:
    """What the workers and the server of a host know of each other before they meet.

    Attributes:
        timeout_s: how long a worker waits for an answer, while the server may be replaced.
        is_server: the process is the server; else it is served.
        listens: workers of other hosts ask the server, too.
        is_trial: it is neither, but measures what a server would gain, see :mod:`.trial`.
        num_workers: how many workers the run has, on all hosts.
        batch_size: see :class:`~distcollect.Inference`.
        num_threads: see :class:`~distcollect.Inference`.
    """

    timeout_s: float
    is_server: bool = False
    listens: bool = False
    is_trial: bool = False
    num_workers: int = 1
    batch_size: int | None = None
    num_threads: int | None = None

    def take_cores(self, cores: tuple[int, ...]) -> None:
        """Use as many of these cores as a server does, which workers may keep busy."""
        if cores:  # a worker in its slot would have got one or two of them
            os.sched_setaffinity(0, cores)
        num_free = len(cores) - self.num_workers
        torch.set_num_threads(self.num_threads or max(1, num_free))


class Kind(enum.IntEnum):
    """What a worker asks for."""

    HELLO = 0
    BEGIN = 1  # the state of a recurrent policy at the start of an episode
    CHOOSE = 2  # actions


class Request(NamedTuple):
    """A request.

    Attributes:
        kind: a :class:`Kind`.
        number: of this worker's requests; the answer has it too.
        first: the first row.
        num_rows: how many.
        least: answer with no older policy_version.
        drawn: how many random numbers each row has drawn in this frame; -1: there was no seed.
    """

    kind: int
    number: int
    first: int = 0
    num_rows: int = 0
    least: int = 0
    drawn: int = -1

    @property
    def rows(self) -> slice:
        """The rows, for arrays."""
        return slice(self.first, self.first + self.num_rows)

    def overlaps(self, other: Request) -> bool:
        """Return True if a row is in both."""
        ends = self.first + self.num_rows, other.first + other.num_rows
        return self.first < ends[1] and other.first < ends[0]


class Answer(NamedTuple):
    """An answer; with a :class:`~distcollect.transport.failure.Failure` if the request failed.

    Attributes:
        number: of the request.
        version: policy_version of the weights that computed it.
        drawn: how many random numbers each row has drawn in this frame by now.
        queue_ns: from the arrival of the request to its forward pass.
        forward_ns: the forward pass, with the copies before and after it.
        num_rows: rows in that pass.
        num_computed: the same with padding.
    """

    number: int
    version: int = 0
    drawn: int = -1
    queue_ns: int = 0
    forward_ns: int = 0
    num_rows: int = 0
    num_computed: int = 0


M = TypeVar("M", Request, Answer)
_FORMS = {Request: struct.Struct("<6q"), Answer: struct.Struct("<7q")}


@dataclass(frozen=True)
class Caller:
    """What a worker says of itself in its first message.

    Attributes:
        worker_id: its slot.
        observation_space, action_space: of a single env.
        observation: leaves of the observations.
        num_rows: how many envs it asks for.
        exploration: the value of an :class:`~distcollect.policy.base.Exploration`.
        for_evaluation: its requests leave the policy's buffers as they were.
    """

    worker_id: int
    observation_space: Any
    action_space: Any
    observation: tuple[Leaf, ...]
    num_rows: int
    exploration: str
    for_evaluation: bool


@dataclass(frozen=True)
class Served:
    """What the server says of the policy.

    Attributes:
        worker_id: the server's slot.
        weights: layout of the policy's weights.
        state: leaves of what a recurrent policy returns for its next call; None: it is not
            recurrent.
        has_is_init: whether it also reads ``is_init``.
        at_root: see :class:`~distcollect.policy.recurrent.PolicyState`.
    """

    worker_id: int
    weights: WeightLayout
    state: tuple[Leaf, ...] | None
    has_is_init: bool = False
    at_root: tuple[Key, ...] = ()

    @property
    def inputs(self) -> tuple[Leaf, ...]:
        """Leaves of the state that it reads."""
        return (*(self.state or ()), *([IS_INIT] if self.has_is_init else ()))


def open_socket() -> socket.socket:
    """A socket of this protocol."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def address_of(name: str) -> bytes:
    """The address of a socket; where people read it, an abstract name begins with "@"."""
    return name.replace("@", "\0").encode()


def is_same_user(connected: socket.socket) -> bool:
    """Return True if the other side belongs to this process's user: what it sends is unpickled."""
    credentials = connected.getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size
    )
    return bool(_PEER_CREDENTIALS.unpack(credentials)[1] == os.getuid())


def send(
    to: socket.socket, message: Request | Answer, content: object = None, memory: int | None = None
) -> None:
    """Send a message, and what belongs to it.

    Args:
        to: the other side.
        message: a request or an answer.
        content: what else is said, in memory of its own; None: nothing.
        memory: descriptor of memory to map that the content describes; None: there is none.
    """
    numbers = _FORMS[type(message)].pack(*message)
    if content is None:
        to.send(numbers)
        return
    with small_file() as file:
        Pickler(file).dump(content)
        file.flush()
        fds = [file.fileno()] if memory is None else [file.fileno(), memory]
        socket.send_fds(to, [numbers], fds)


def receive(connected: socket.socket, kind: type[M]) -> tuple[M, list[int]] | None:
    """The next message, and the descriptors that came with it; None: the other side has ended."""
    form = _FORMS[kind]
    try:
        numbers, fds, _, _ = socket.recv_fds(connected, form.size, 2, socket.MSG_CMSG_CLOEXEC)
    except ConnectionError:
        return None
    return (kind(*form.unpack(numbers)), fds) if len(numbers) == form.size else None


def unpacked(fd: int) -> Any:
    """What was sent in memory of its own; closes the descriptor.

    An error that one of its objects raises is passed on.
    """
    with open(fd, "rb") as file:
        file.seek(0)
        return pickle.load(file)


def make_memory(leaves: Iterable[Leaf], num_rows: int) -> tuple[int, Arrays]:
    """Make memory for arrays ``[num_rows, *shape]``; its descriptor, and the arrays."""
    leaves = tuple(leaves)
    fd = memory_file("distcollect-rows")
    os.ftruncate(fd, sum(_size(leaf, num_rows) for leaf in leaves) or 1)
    return fd, _arrays(fd, leaves, num_rows)


def own_arrays(leaves: Iterable[Leaf], num_rows: int) -> Arrays:
    """The same arrays in memory of this process alone."""
    return {leaf.key: leaf.zeros(num_rows) for leaf in leaves}


def map_memory(fd: int, leaves: Iterable[Leaf], num_rows: int) -> Arrays:
    """The arrays in memory that the other side has made for the same leaves; closes ``fd``."""
    try:
        return _arrays(fd, leaves, num_rows)
    finally:
        os.close(fd)


def _arrays(fd: int, leaves: Iterable[Leaf], num_rows: int) -> Arrays:
    memory, start, arrays = mmap.mmap(fd, 0), 0, {}
    for leaf in leaves:
        shape = num_rows, *leaf.shape
        arrays[leaf.key] = np.ndarray(shape, leaf.numpy_dtype, memory, start)
        start += _size(leaf, num_rows)
    return arrays


def _size(leaf: Leaf, num_rows: int) -> int:
    """The size of a leaf's array, with what is unused before the next one."""
    num_bytes = num_rows * math.prod(leaf.shape) * leaf.dtype.itemsize
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
