"""The trainer's side of control connections: the join handshake, and who is connected.

A plain TCP connection between the trainer and each worker (and each supervisor of a launched
rank), carrying :mod:`.messages`. It comes before RPC: nothing is unpickled from a process that has
not shown the run's token and matching versions. It stays open while both processes live: the
kernel closes it however a process ends, which the other side sees at once.
"""

from __future__ import annotations

import contextlib
import enum
import hmac
import logging
import selectors
import socket
import threading
from dataclasses import dataclass, field, replace

from distcollect.errors import LaunchError
from distcollect.net.framing import Frame, FrameReader, configure_socket, open_sockets
from distcollect.net.interfaces import listen
from distcollect.net.messages import Hello, Message, Refused, decode, decode_as, encode, versions

log = logging.getLogger(__name__)

# Messages are small: a peer that takes longer to receive one hangs.
_SEND_TIMEOUT_S = 5.0


class Connection:
    """The trainer's end of one connection.

    Attributes:
        hello: how the peer introduced itself, without the token.
    """

    def __init__(self, sock: socket.socket, hello: Hello) -> None:
        self.hello = hello
        self._sock = sock
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        """Send a message; do nothing if the peer is gone (its end is reported anyhow)."""
        with self._lock:
            try:
                self._sock.sendall(encode(message))
            except OSError:
                log.debug("could not send %s to %s", type(message).__name__, self.hello.host)

    def close(self) -> None:
        """End the connection; it is reported as closed."""
        with contextlib.suppress(OSError):  # closed already
            self._sock.shutdown(socket.SHUT_RDWR)


class JoinServerEvents:
    """What a join server reports, on its own thread. Override what is of interest."""

    def admit(self, connection: Connection) -> Message:
        """A peer with the right token and versions joins; the answer: its welcome or Refused."""
        raise NotImplementedError

    def admitted(self, connection: Connection) -> None:
        """The welcome was sent: other messages may follow."""

    def refused(self, hello: Hello | None, reason: str) -> None:
        """A peer was refused; ``hello`` is None if it did not show the token, or is unreadable."""

    def received(self, connection: Connection, message: Message) -> None:
        """A message came from an admitted peer."""

    def closed(self, connection: Connection) -> None:
        """An admitted peer is gone."""


class _State(enum.Enum):
    """Of a peer; from each state only a later one can follow."""

    INTRODUCING = enum.auto()  # its Hello has not come yet
    ADMITTED = enum.auto()
    REFUSED = enum.auto()  # what else it sends is not read


@dataclass
class _Peer:
    sock: socket.socket
    state: _State = _State.INTRODUCING
    reader: FrameReader = field(default_factory=FrameReader)
    connection: Connection | None = None

    @property
    def is_read(self) -> bool:
        return self.state is not _State.REFUSED


class JoinServer:
    """Where the workers and supervisors of a run join: one listener, one thread for all.

    Attributes:
        events: to report to; may be replaced at any time.
        address: where it listens.
        port: where it listens.
    """

    def __init__(self, address: str, token: str, events: JoinServerEvents, port: int = 0) -> None:
        """Listen on ``address`` alone.

        Raises:
            LaunchError: see :func:`~distcollect.net.interfaces.listen`.
        """
        self.events = events
        self._token = token
        self._listener = listen(address, port)
        self._listener.setblocking(False)
        open_sockets.add(self._listener)
        self.address: str = address
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._wake, self._waker = socket.socketpair()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._peers: dict[socket.socket, _Peer] = {}
        self._thread = threading.Thread(target=self._run, name="distcollect-join", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close all connections: each peer takes that as the trainer's end."""
        # By a byte, not by closing the socket: a forked child of this process may hold it open.
        with contextlib.suppress(OSError):  # closed before
            self._waker.send(b"x")
        if threading.current_thread() is not self._thread:
            self._thread.join(5)

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._wake:
                    self._close_all()
                    return
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    assert isinstance(key.fileobj, socket.socket)
                    self._read(self._peers[key.fileobj])

    def _close_all(self) -> None:
        for sock in (*self._peers, self._listener, self._wake):
            self._selector.unregister(sock)
            sock.close()
        self._waker.close()
        self._selector.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            log.warning("could not accept a connection: %s", error)
            return
        sock.setblocking(True)
        sock.settimeout(_SEND_TIMEOUT_S)
        configure_socket(sock)
        self._peers[sock] = _Peer(sock)
        self._selector.register(sock, selectors.EVENT_READ)

    def _read(self, peer: _Peer) -> None:
        try:
            data = peer.sock.recv(65536)
        except OSError:
            data = b""
        try:
            if not data:
                self._drop(peer)
                return
            if peer.is_read:
                peer.reader.feed(data)
            while peer.is_read and (frame := peer.reader.next()) is not None:
                self._handle(peer, frame)
        except Exception as error:  # noqa: BLE001 - see below
            # Nothing that a peer sends may end the thread that sees workers come and go.
            log.warning("closing a connection after an unusable message: %s", error)
            self._drop(peer)

    def _drop(self, peer: _Peer) -> None:
        del self._peers[peer.sock]
        self._selector.unregister(peer.sock)
        peer.sock.close()
        if peer.state is _State.ADMITTED:
            assert peer.connection is not None
            try:
                self.events.closed(peer.connection)
            except Exception:
                log.exception("the end of a connection could not be reported")

    def _handle(self, peer: _Peer, frame: Frame) -> None:
        if peer.connection is not None:
            self.events.received(peer.connection, decode(frame))
            return
        # The versions are compared before the message is decoded: another protocol's may differ.
        if not self._has_token(frame):
            self._refuse(
                peer,
                None,
                "it doesn't have this run's token: DISTCOLLECT_TOKEN_FILE has to name a file with "
                "the same secret there and here",
            )
        elif differing := _differing_versions(frame):
            # Only a peer with the token is believed what it says about itself.
            hello = None
            with contextlib.suppress(LaunchError):
                hello = _without_token(decode_as(Hello, frame))
            self._refuse(peer, hello, f"{differing}; install the same on all hosts")
        else:
            try:
                admitted = _without_token(decode_as(Hello, frame))
            except LaunchError as error:  # for example a rank of the doctor at a trainer's port
                self._refuse(peer, None, str(error))
            else:
                self._admit(peer, admitted)

    def _refuse(self, peer: _Peer, hello: Hello | None, reason: str) -> None:
        peer.state = _State.REFUSED
        with contextlib.suppress(OSError):
            peer.sock.sendall(encode(Refused(reason)))
        self.events.refused(hello, reason)
        with contextlib.suppress(OSError):
            peer.sock.shutdown(socket.SHUT_RDWR)

    def _admit(self, peer: _Peer, hello: Hello) -> None:
        connection = Connection(peer.sock, hello)
        answer = self.events.admit(connection)
        connection.send(answer)
        if isinstance(answer, Refused):
            peer.state = _State.REFUSED
            connection.close()
            return
        peer.state = _State.ADMITTED
        peer.connection = connection
        self.events.admitted(connection)

    def _has_token(self, frame: Frame) -> bool:
        token = frame.get("token")
        return isinstance(token, str) and hmac.compare_digest(
            token.encode(errors="surrogatepass"), self._token.encode()
        )


def _differing_versions(frame: Frame) -> str:
    """The versions of a Hello that differ from ours, in words; "" if none does."""
    theirs = frame.get("versions")
    theirs = theirs if isinstance(theirs, dict) else {}
    return ", ".join(
        f"its {name} is {theirs.get(name, 'unknown')}, the trainer's is {version}"
        for name, version in versions().items()
        if theirs.get(name) != version
    )


def _without_token(hello: Hello) -> Hello:
    """What is kept of a hello: it may be logged."""
    return replace(hello, token="")
