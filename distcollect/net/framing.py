"""Frames on a control connection: a 4-byte length, then a JSON object; and its socket options."""

from __future__ import annotations

import json
import os
import socket
import struct
import weakref
from typing import Any

from distcollect.errors import LaunchError

Frame = dict[str, Any]

_LENGTH = struct.Struct("!I")
_MAX_FRAME = 1 << 20

open_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_in_child() -> None:
    # A forked child (a DataLoader's, an AsyncVectorEnv's) that kept these sockets open would hide
    # this process's end from the other side.
    for sock in list(open_sockets):
        sock.close()


os.register_at_fork(after_in_child=_close_in_child)


def configure_socket(sock: socket.socket) -> None:
    """Send small messages at once, and notice a peer that has gone silent."""
    open_sockets.add(sock)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A host that vanishes closes nothing; the kernel's probes find that in about 10 s.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", 4),
        ("TCP_KEEPINTVL", 2),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", 10_000),  # in ms: the same while sent data is not acknowledged
    ):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def pack(frame: Frame) -> bytes:
    """A frame as bytes."""
    data = json.dumps(frame).encode()
    return _LENGTH.pack(len(data)) + data


class FrameReader:
    """Puts frames together from the pieces that arrive."""

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next(self) -> Frame | None:
        """The next whole frame, None until there is one.

        Raises:
            LaunchError: the bytes are no such frame.
        """
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > _MAX_FRAME:
            raise LaunchError(f"a frame of {length} bytes: the peer is not part of distcollect")
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        data, self._buffer = self._buffer[_LENGTH.size : end], self._buffer[end:]
        try:
            frame = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise LaunchError(
                "a frame without JSON: the peer is not part of distcollect"
            ) from error
        if not isinstance(frame, dict):
            raise LaunchError("a frame without a JSON object: the peer is not part of distcollect")
        return frame
