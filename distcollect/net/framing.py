"""Messages on a control connection: how they are framed, and the versions both sides compare."""

from __future__ import annotations

import json
import socket
import struct
import sys
import weakref
from typing import Any

import tensordict
import torch

from distcollect.errors import LaunchError

PROTOCOL = 1


_LENGTH = struct.Struct("!I")


_MAX_FRAME = 1 << 20


Message = dict[str, Any]


def versions() -> dict[str, str]:
    """What has to match for objects and messages to travel between two processes."""
    return {
        "protocol": str(PROTOCOL),
        "python": "{}.{}".format(*sys.version_info[:2]),
        "torch": _minor(torch.__version__),
        "tensordict": _minor(tensordict.__version__),
    }


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


open_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def close_in_child() -> None:
    """Close this process's connections in a child that it has forked."""
    # A forked child (a DataLoader's, an AsyncVectorEnv's) that kept these open would keep the
    # other side from seeing this process's end.
    for sock in list(open_sockets):
        sock.close()


def configure_socket(sock: socket.socket) -> None:
    """Send small messages at once, and notice a peer that has gone silent."""
    open_sockets.add(sock)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A host that vanishes closes nothing; the kernel's probes find it in about 10 s.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", 4),
        ("TCP_KEEPINTVL", 2),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", 10_000),  # the same, in ms, while something sent is not acknowledged
    ):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def encode(message: Message) -> bytes:
    """A message as bytes: its length, then JSON."""
    data = json.dumps(message).encode()
    return _LENGTH.pack(len(data)) + data


class Decoder:
    """Puts frames together from whatever pieces arrive."""

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next(self) -> Message | None:
        """The next whole frame, None until there is one.

        Raises:
            LaunchError: what arrived is no frame of ours.
        """
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > _MAX_FRAME:
            raise LaunchError(f"a frame of {length} bytes: this is not a peer of ours")
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        frame, self._buffer = self._buffer[_LENGTH.size : end], self._buffer[end:]
        try:
            message = json.loads(frame)
        except (ValueError, RecursionError) as error:
            raise LaunchError("a frame that is no JSON: this is not a peer of ours") from error
        if not isinstance(message, dict):
            raise LaunchError("a frame that is no JSON object: this is not a peer of ours")
        return message
