"""One connection of the join server, from accepting it to closing it."""

from __future__ import annotations

import enum
import logging
import socket
from collections.abc import Callable

from distcollect.net.framing import MAX_FRAME, FrameReader
from distcollect.net.handshake import TrainerSide
from distcollect.net.messages import Hello, Message, encode
from distcollect.net.outbox import Outbox

log = logging.getLogger(__name__)

# What a peer may send before it has proven that it knows the token.
MAX_UNPROVEN_BYTES = 4096
_MAX_UNSENT = 8 * MAX_FRAME


class State(enum.Enum):
    """Of a connection of the join server."""

    UNPROVEN = enum.auto()  # in the handshake
    PROVEN = enum.auto()  # the peer knows the token; its Hello has not come yet
    ADMITTED = enum.auto()
    REFUSED = enum.auto()  # what else the peer sends is not read; it is closed soon
    CLOSED = enum.auto()


class Connection:
    """The trainer's end of a connection to a process that joins.

    The join server alone uses it until the peer is admitted. Then others may send and close, on any
    thread.

    Attributes:
        hello: how the peer introduced itself; once it is admitted.
        state: see :class:`State`; the join server changes it, and what follows.
        sock: does not block.
        address: of the peer's host.
        handshake: see :class:`TrainerSide`.
        reader: puts the peer's frames together.
        num_reads: how often something was read.
        outbox: what is still to be sent.
    """

    hello: Hello

    def __init__(
        self,
        sock: socket.socket,
        address: str,
        token: str,
        has_unsent: Callable[[], None],
    ) -> None:
        """``has_unsent``: called when the peer does not take all at once."""
        self.sock = sock
        self.address = address
        self.state = State.UNPROVEN
        self.handshake = TrainerSide(token)
        self.reader = FrameReader(MAX_UNPROVEN_BYTES)
        self.num_reads = 0
        self.outbox = Outbox(sock, _MAX_UNSENT)
        self._has_unsent = has_unsent

    @property
    def is_over(self) -> bool:
        """True if nothing more is read."""
        return self.state in (State.REFUSED, State.CLOSED)

    @property
    def is_stranger(self) -> bool:
        """True if the peer has not proven that it knows the token."""
        return self.state in (State.UNPROVEN, State.REFUSED)

    def send(self, message: Message) -> None:
        """Send a message without waiting for the peer; do nothing if the peer is gone.

        The server's thread sends what the peer does not take now. A peer that takes nothing for
        ``server.SEND_TIMEOUT_S`` is cut off. Its end is reported in both cases.
        """
        try:
            if self.outbox.send(encode(message)):
                self._has_unsent()
        except OSError as error:
            log.debug("no %s to %s: %s", type(message).__name__, self.address, error)
            self.outbox.end()

    def close(self) -> None:
        """End the connection; it is reported as closed."""
        self.outbox.end()
