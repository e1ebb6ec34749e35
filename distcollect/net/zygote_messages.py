"""What a zygote and the process that uses it say to each other.

They are pickled, and go over a pair of sockets that nobody else can reach.
"""

from __future__ import annotations

import pickle
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from distcollect.net.messages import WorkerBoot

_LONGEST_BYTES = 65536


@dataclass(frozen=True)
class Fork:
    """Fork a worker.

    Four descriptors come along: of a :class:`Child`, of its step counter, of stdout and of stderr.

    Attributes:
        number: names this worker in what follows.
    """

    number: int


@dataclass(frozen=True)
class Child:
    """What a forked worker starts with. It may be large, so it travels in an anonymous file.

    Attributes:
        boot: its slot, and where it joins.
        environ: its environment variables.
        folder: its working folder.
        cores: that it may run on.
    """

    boot: WorkerBoot
    environ: dict[str, str]
    folder: str
    cores: frozenset[int]


@dataclass(frozen=True)
class Signal:
    """Send a signal to a worker; with ``group``, to all processes of its group as well."""

    number: int
    signal: int
    group: bool


@dataclass(frozen=True)
class Retire:
    """Fork no more, and end when the last worker has ended."""


@dataclass(frozen=True)
class Forked:
    """A worker was forked."""

    number: int
    pid: int


@dataclass(frozen=True)
class Unforkable:
    """No worker was forked, and none can be.

    Attributes:
        number: of the request.
        reason: why, in words.
    """

    number: int
    reason: str


@dataclass(frozen=True)
class Ended:
    """A worker has ended and was reaped.

    Attributes:
        number: of the request.
        code: its exit code, -N if signal N ended it.
    """

    number: int
    code: int


ToZygote: TypeAlias = Fork | Signal | Retire
FromZygote: TypeAlias = Forked | Unforkable | Ended


def make_sockets() -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection that keeps messages apart."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(sock: socket.socket, message: ToZygote | FromZygote, fds: Sequence[int] = ()) -> None:
    """Send a message, and copies of the descriptors ``fds``.

    Raises:
        OSError: the other process is gone.
    """
    socket.send_fds(sock, [pickle.dumps(message)], fds)


def receive(sock: socket.socket, max_fds: int = 0) -> tuple[Any, list[int]]:
    """The next message and its descriptors; None when the other process is gone.

    Raises:
        OSError: the connection broke off.
    """
    data, fds, _, _ = socket.recv_fds(sock, _LONGEST_BYTES, max_fds)
    return (pickle.loads(data) if data else None), fds
