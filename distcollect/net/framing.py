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
MAX_FRAME = 1 << 20  # bytes; what a peer without the token may send is far less

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
        (socket.TCP_KEEPIDLE, 4),
        (socket.TCP_KEEPINTVL, 2),
        (socket.TCP_KEEPCNT, 3),
        (socket.TCP_USER_TIMEOUT, 10_000),  # in ms: the same while sent data is not acknowledged
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def pack(frame: Frame) -> bytes:
    """Return a frame as bytes, with its length."""
    return with_length(json.dumps(frame).encode())


def with_length(data: bytes) -> bytes:
    """Return the bytes of a frame, after their length."""
    return _LENGTH.pack(len(data)) + data


def parse(data: bytes) -> Frame:
    """Return the object in a frame's bytes.

    Raises:
        LaunchError: they hold no JSON object.
    """
    try:
        frame = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise LaunchError("a frame without JSON: the peer is not part of distcollect") from error
    if not isinstance(frame, dict):
        raise LaunchError("a frame without a JSON object: the peer is not part of distcollect")
    return frame


class FrameReader:
    """Puts frames together from the pieces that arrive.

    Attributes:
        max_frame: the most bytes that a frame may have, without its length.
    """

    def __init__(self, max_frame: int = MAX_FRAME) -> None:
        self.max_frame = max_frame
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        self._buffer += data  # without a copy of what is there already

    def next(self) -> bytes | None:
        """Return the next whole frame, without its length; None until there is one.

        Raises:
            LaunchError: the frame is longer than ``max_frame``.
        """
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > self.max_frame:
            raise LaunchError(f"a frame of {length} bytes: the peer is not part of distcollect")
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        data = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        return data
