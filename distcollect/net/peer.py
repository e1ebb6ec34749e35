"""One connection of the join server, from accepting it to closing it."""

from __future__ import annotations

import enum
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass, field

from distcollect.net.framing import MAX_FRAME, FrameReader
from distcollect.net.handshake import TrainerSide
from distcollect.net.messages import Hello, Message, encode
from distcollect.net.outbox import Outbox

log = logging.getLogger(__name__)

# What a peer may send before it has proven that it knows the token.
MAX_UNPROVEN_BYTES = 4096
MAX_UNPROVEN_READS = 16
_MAX_UNSENT = 8 * MAX_FRAME


class Connection:
    """The trainer's end of the connection to a peer that knows the token.

    Attributes:
        hello: how the peer introduced itself.
    """

    def __init__(self, outbox: Outbox, hello: Hello, has_unsent: Callable[[], None]) -> None:
        self.hello = hello
        self._outbox = outbox
        self._has_unsent = has_unsent

    def send(self, message: Message) -> None:
        """Send a message without waiting for the peer; do nothing if the peer is gone.

        The server's thread sends what the peer does not take now. A peer that takes nothing for
        ``server.SEND_TIMEOUT_S`` is cut off. Its end is reported in both cases.
        """
        try:
            if self._outbox.send(encode(message)):
                self._has_unsent()
        except OSError as error:
            log.debug("no %s to %s: %s", type(message).__name__, self.hello.host, error)
            self._outbox.end()

    def close(self) -> None:
        """End the connection; it is reported as closed."""
        self._outbox.end()


class PeerState(enum.Enum):
    """Of a peer of the join server."""

    UNPROVEN = enum.auto()  # in the handshake
    PROVEN = enum.auto()  # it knows the token; its Hello has not come yet
    ADMITTED = enum.auto()
    REFUSED = enum.auto()  # what else it sends is not read; it is closed soon
    CLOSED = enum.auto()


_NEXT = {
    PeerState.UNPROVEN: {PeerState.PROVEN, PeerState.REFUSED, PeerState.CLOSED},
    PeerState.PROVEN: {PeerState.ADMITTED, PeerState.REFUSED, PeerState.CLOSED},
    PeerState.ADMITTED: {PeerState.CLOSED},
    PeerState.REFUSED: {PeerState.CLOSED},
    PeerState.CLOSED: set(),
}


@dataclass(eq=False)
class Peer:
    """A connection of the join server.

    Attributes:
        sock: its socket, which does not block.
        address: of the peer's host.
        handshake: see :class:`TrainerSide`.
        state: see :class:`PeerState`; :meth:`enter` changes it.
        reader: puts its frames together.
        num_reads: how often something was read from it.
        connection: what the rest of the trainer uses; None before it is admitted.
        outbox: what is still to be sent to it.
    """

    sock: socket.socket
    address: str
    handshake: TrainerSide
    state: PeerState = PeerState.UNPROVEN
    reader: FrameReader = field(default_factory=lambda: FrameReader(MAX_UNPROVEN_BYTES))
    num_reads: int = 0
    connection: Connection | None = None

    def __post_init__(self) -> None:
        self.outbox = Outbox(self.sock, _MAX_UNSENT)

    def enter(self, state: PeerState) -> None:
        """Change the state."""
        assert state in _NEXT[self.state], f"{self.state} can't become {state}"
        self.state = state

    @property
    def is_stranger(self) -> bool:
        """Whether it may still prove that it knows the token, and has not yet."""
        return self.state is PeerState.UNPROVEN

    @property
    def is_read(self) -> bool:
        """Whether what it sends is of interest."""
        return self.state not in (PeerState.REFUSED, PeerState.CLOSED)
