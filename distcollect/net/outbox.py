"""Chunks that are still to be sent on a socket."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from itertools import islice
from typing import TypeAlias

Chunk: TypeAlias = bytes | bytearray | memoryview

_CHUNKS_AT_ONCE = 64  # the kernel takes at most 1,024


class Outbox:
    """Sends chunks in their order, without copying any, and keeps what the peer does not take yet.

    Any thread may use it. On a socket that blocks, nothing is ever kept.

    Attributes:
        num_unsent: bytes that the peer has not taken yet.
    """

    def __init__(self, sock: socket.socket, max_unsent: int) -> None:
        """``max_unsent``: the most bytes to keep."""
        self._sock = sock
        self._max_unsent = max_unsent
        # Reentrant: garbage collection under it may finalize a collector, which sends messages.
        self._lock = threading.RLock()
        self._is_sending = False
        self._unsent: deque[memoryview] = deque()
        self.num_unsent = 0
        self._ended = False

    def send(self, *chunks: Chunk) -> bool:
        """Send, or keep what can't be sent now; without chunks, try again to send what is kept.

        Returns:
            Whether the peer still has to take something, so that this is to be called again.

        Raises:
            OSError: the connection has ended, or the peer would have to take more than
                ``max_unsent`` bytes later. To be followed by :meth:`end` or :meth:`close`.
        """
        with self._lock:
            if self._ended:
                raise OSError("the connection has ended")
            for chunk in chunks:
                view = memoryview(chunk).cast("B")
                if view:
                    self._unsent.append(view)
                    self.num_unsent += len(view)
            if not self._is_sending:  # else this is a call within _send(), which sends this too
                self._is_sending = True
                try:
                    self._send()
                except BlockingIOError:
                    pass
                finally:
                    self._is_sending = False
            if self.num_unsent > self._max_unsent:
                raise OSError(f"the peer did not take {self.num_unsent} bytes")
            return bool(self._unsent)

    def _send(self) -> None:
        while self._unsent:
            num_sent = self._sock.sendmsg(list(islice(self._unsent, _CHUNKS_AT_ONCE)))
            self.num_unsent -= num_sent
            while num_sent:
                chunk = self._unsent.popleft()
                if num_sent < len(chunk):
                    self._unsent.appendleft(chunk[num_sent:])
                num_sent -= min(num_sent, len(chunk))

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
        self.num_unsent = 0
