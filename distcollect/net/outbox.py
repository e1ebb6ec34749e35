"""What is still to be sent on a socket that does not block."""

from __future__ import annotations

import contextlib
import socket
import threading


class Outbox:
    """Sends on a non-blocking socket, and keeps what the peer does not take yet.

    Any thread may use it.
    """

    def __init__(self, sock: socket.socket, max_unsent: int) -> None:
        """``max_unsent``: the most bytes to keep."""
        self._sock = sock
        self._max_unsent = max_unsent
        # Reentrant: garbage collection under it may finalize a collector, which sends messages.
        self._lock = threading.RLock()
        self._is_sending = False
        self._unsent = bytearray()
        self._ended = False

    @property
    def num_unsent(self) -> int:
        """Bytes that the peer has not taken yet."""
        return len(self._unsent)

    def send(self, data: bytes) -> bool:
        """Send, or keep what can't be sent now.

        Returns:
            Whether the peer still has to take something, and :meth:`flush` is to be called.

        Raises:
            OSError: the connection has ended, or the peer would have to take more than
                ``max_unsent`` bytes later. To be followed by :meth:`end` or :meth:`close`.
        """
        with self._lock:
            self._check_open()
            self._unsent += data
            self._send_now()
            if len(self._unsent) > self._max_unsent:
                raise OSError(f"the peer did not take {len(self._unsent)} bytes")
            return bool(self._unsent)

    def flush(self) -> bool:
        """Send what the peer takes now; returns whether something is left.

        Raises:
            OSError: the peer is gone.
        """
        with self._lock:
            self._check_open()
            self._send_now()
            return bool(self._unsent)

    def _check_open(self) -> None:
        if self._ended:
            raise OSError("the connection has ended")

    def _send_now(self) -> None:
        if self._is_sending:  # a call within the loop below: that sends this too
            return
        self._is_sending = True
        try:
            while self._unsent:
                num_sent = self._sock.send(self._unsent)
                del self._unsent[:num_sent]
        except BlockingIOError:
            pass
        finally:
            self._is_sending = False

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
