"""What goes over a control connection: frames, the bytes still to be sent, socket options.

A frame is a length of four bytes, then as many bytes, see :mod:`.messages`.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import weakref

from distcollect.errors import LaunchError

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


def with_length(data: bytes) -> bytes:
    """Return the bytes of a frame, after their length."""
    return _LENGTH.pack(len(data)) + data


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


class Outbox:
    """Sends bytes in their order, and keeps what the peer does not take yet.

    Any thread may use it. On a socket that blocks, nothing is ever kept.
    """

    def __init__(self, sock: socket.socket, max_unsent: int) -> None:
        """``max_unsent``: the most bytes to keep."""
        self._sock = sock
        self._max_unsent = max_unsent
        self._lock = threading.Lock()
        self._unsent = bytearray()
        self._ended = False

    @property
    def num_unsent(self) -> int:
        """Bytes that the peer has not taken yet."""
        return len(self._unsent)

    def send(self, data: bytes = b"") -> bool:
        """Send, or keep what can't be sent now; without data, try again to send what is kept.

        Returns:
            Whether the peer still has to take something, so that this is to be called again.

        Raises:
            OSError: the connection has ended, or the peer would have to take more than
                ``max_unsent`` bytes later. To be followed by :meth:`end` or :meth:`close`.
        """
        with self._lock:
            if self._ended:
                raise OSError("the connection has ended")
            self._unsent += data
            with contextlib.suppress(BlockingIOError):
                while self._unsent:
                    num_sent = self._sock.send(self._unsent)
                    del self._unsent[:num_sent]
            if self.num_unsent > self._max_unsent:
                raise OSError(f"the peer did not take {self.num_unsent} bytes")
            return bool(self._unsent)

    def end(self) -> None:
        """End the connection both ways; what is unsent is dropped.

        The socket stays open until :meth:`close`.
        """
        with self._lock, contextlib.suppress(OSError):  # closed already
            self._drop_unsent()
            self._sock.shutdown(socket.SHUT_RDWR)

    def end_sending(self) -> None:
        """Tell the peer that nothing more will come."""
        with self._lock, contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the socket; what is unsent is dropped."""
        with self._lock:  # no other thread may be sending: the descriptor can be reused at once
            self._drop_unsent()
            self._sock.close()

    def _drop_unsent(self) -> None:
        self._ended = True
        self._unsent.clear()
