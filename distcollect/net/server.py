"""The join handshake, and a connection whose end tells each side that the other is gone.

A plain TCP connection between the trainer and each worker (and each supervisor of a launched
rank), carrying frames of a 4-byte length and JSON. It comes before RPC: nothing is unpickled from
a process that hasn't shown the run's token and matching versions. It stays open as a lifeline: the
kernel closes it however a process ends, which the other side sees at once.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import selectors
import socket
import threading

from distcollect.net.framing import (
    Decoder,
    Message,
    close_in_child,
    configure_socket,
    encode,
    open_sockets,
    versions,
)
from distcollect.net.interfaces import listen

log = logging.getLogger(__name__)


os.register_at_fork(after_in_child=close_in_child)


class Connection:
    """The trainer's end of one connection.

    Attributes:
        hello: how the peer introduced itself; empty until it has.
        decoder: puts together what it sends.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.hello: Message = {}
        self.decoder = Decoder()
        self._sock = sock
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        """Send one frame; nothing if the peer is gone (its end is reported anyhow)."""
        with self._lock:
            try:
                self._sock.sendall(encode(message))
            except OSError:
                log.debug("could not send %s to %s", list(message), self.hello.get("host"))

    def close(self) -> None:
        """End the connection; it is reported as closed."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            log.debug("connection was closed already")


class JoinServerEvents:
    """What a gate reports, on its own thread. Override what is of interest."""

    def admit(self, connection: Connection) -> Message:
        """A peer with the right token and versions introduced itself; the welcome for it."""
        raise NotImplementedError

    def admitted(self, connection: Connection) -> None:
        """The welcome was sent: other messages may follow."""

    def refused(self, hello: Message, reason: str) -> None:
        """A peer was turned away."""

    def received(self, connection: Connection, message: Message) -> None:
        """A frame came from an admitted peer."""

    def closed(self, connection: Connection) -> None:
        """An admitted peer is gone."""


class JoinServer:
    """Where the workers and supervisors of a run join: one listener, one thread for all.

    Attributes:
        events: who is told; may be replaced at any time.
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
        self._connections: dict[socket.socket, Connection] = {}
        self._thread = threading.Thread(target=self._run, name="distcollect-gate", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close all connections: whoever is at the other end takes it as the trainer's end."""
        # Not by closing it: a forked child of this process may hold it open.
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
                    self._read(key.fileobj)

    def _close_all(self) -> None:
        for sock in (*self._connections, self._listener, self._wake):
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
        # Frames are small: one that can't be sent within this time goes to a peer that hangs.
        sock.settimeout(5)
        configure_socket(sock)
        self._connections[sock] = Connection(sock)
        self._selector.register(sock, selectors.EVENT_READ)

    def _read(self, sock: socket.socket) -> None:
        connection = self._connections[sock]
        try:
            data = sock.recv(65536)
        except OSError:
            data = b""
        try:
            if not data:
                self._drop(sock)
                return
            connection.decoder.feed(data)
            while (message := connection.decoder.next()) is not None:
                self._handle(connection, message)
        except Exception as error:  # noqa: BLE001 - see below
            # No stranger may end the thread that sees workers come and go.
            log.warning("closing a connection that speaks something else: %s", error)
            self._drop(sock)

    def _drop(self, sock: socket.socket) -> None:
        connection = self._connections.pop(sock)
        self._selector.unregister(sock)
        sock.close()
        if connection.hello:
            try:
                self.events.closed(connection)
            except Exception:
                log.exception("the end of a connection could not be reported")

    def _handle(self, connection: Connection, message: Message) -> None:
        if connection.hello:
            self.events.received(connection, message)
            return
        reason = self._objection(message)
        if reason:
            connection.send({"refused": reason})
            # What a stranger says of itself must not be acted upon.
            known = self._has_token(message)
            self.events.refused(_without_token(message) if known else {"role": "stranger"}, reason)
            connection.close()
            return
        # The token has done its work: what is kept may be logged.
        connection.hello = _without_token(message)
        connection.send(self.events.admit(connection))
        self.events.admitted(connection)

    def _has_token(self, hello: Message) -> bool:
        token = hello.get("token")
        return isinstance(token, str) and hmac.compare_digest(
            token.encode(errors="surrogatepass"), self._token.encode()
        )

    def _objection(self, hello: Message) -> str:
        if not self._has_token(hello):
            return (
                "it doesn't have this run's token: DISTCOLLECT_TOKEN_FILE has to name a file with "
                "the same secret there and here"
            )
        mine, theirs = versions(), hello.get("versions")
        theirs = theirs if isinstance(theirs, dict) else {}
        differing = ", ".join(
            f"its {name} is {theirs.get(name, 'unknown')}, the trainer's is {version}"
            for name, version in mine.items()
            if theirs.get(name) != version
        )
        return f"{differing}; install the same on all hosts" if differing else ""


def _without_token(hello: Message) -> Message:
    return {key: value for key, value in hello.items() if key != "token"}
