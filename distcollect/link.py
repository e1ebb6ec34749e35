"""The join handshake, and a connection whose end tells each side that the other is gone.

A plain TCP connection between the trainer and each worker (and each supervisor of a launched
rank), carrying frames of a 4-byte length and JSON. It comes before RPC: nothing is unpickled from
a process that hasn't shown the run's token and matching versions. It stays open as a lifeline: the
kernel closes it however a process ends, which the other side sees at once.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import os
import platform
import selectors
import signal
import socket
import struct
import sys
import threading
import weakref
from typing import Any, NoReturn

import tensordict
import torch

from .errors import LaunchError
from .network import listen

log = logging.getLogger(__name__)

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


_open_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_in_child() -> None:
    # A forked child (a DataLoader's, an AsyncVectorEnv's) that kept these open would keep the
    # other side from seeing this process's end.
    for sock in list(_open_sockets):
        sock.close()


os.register_at_fork(after_in_child=_close_in_child)


def _configure(sock: socket.socket) -> None:
    _open_sockets.add(sock)
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


def _encode(message: Message) -> bytes:
    data = json.dumps(message).encode()
    return _LENGTH.pack(len(data)) + data


class NoAnswer(LaunchError):
    """The handshake broke off, as the network did: that may get better."""


class Lifeline:
    """A worker's or supervisor's end of the connection. Reads block.

    Attributes:
        welcome: the trainer's answer to :meth:`join`; empty before.
    """

    def __init__(self, host: str, port: int, timeout_s: float) -> None:
        """Connect.

        Raises:
            OSError: nobody listens there, or no answer within ``timeout_s``.
        """
        self._host, self._port = host, port
        self._sock = socket.create_connection((host, port), timeout=timeout_s)
        _configure(self._sock)
        self._lock = threading.Lock()
        self._decoder = _Decoder()
        self.welcome: Message = {}

    @property
    def local_address(self) -> str:
        """This host's address on the route to the trainer."""
        return str(self._sock.getsockname()[0])

    def join(self, role: str, token: str, **about: Any) -> Message:
        """Introduce this process; the trainer's welcome.

        Raises:
            NoAnswer: the connection broke off, or there was no answer in time.
            LaunchError: it refused; says why.
        """
        self.send(
            {
                "role": role,
                "token": token,
                "versions": versions(),
                "host": platform.node(),
                "pid": os.getpid(),
                **about,
            }
        )
        try:
            answer = self.receive()
        except LaunchError as error:
            raise LaunchError(
                f"what listens at {self._host}:{self._port} is no trainer of distcollect's "
                f"({error}): check the address"
            ) from error
        if answer is None:
            raise NoAnswer("it took the connection, but did not answer the join handshake")
        if "refused" in answer:
            raise LaunchError(f"the trainer refused this {role}: {answer['refused']}")
        self._sock.settimeout(None)
        self.welcome = answer
        return answer

    def send(self, message: Message) -> None:
        """Send one frame; silently nothing if the trainer is gone (reading will tell)."""
        with self._lock:
            try:
                self._sock.sendall(_encode(message))
            except OSError:
                log.debug("lifeline: could not send %s", message.keys())

    def receive(self) -> Message | None:
        """The next frame, None once the trainer is gone or can't be reached any more."""
        while True:
            message = self._decoder.next()
            if message is not None:
                return message
            try:
                data = self._sock.recv(65536)
            except OSError:  # a TimeoutError is the kernel's, too: the host can't be reached
                return None
            if not data:
                return None
            self._decoder.feed(data)

    def close(self) -> None:
        """Close it; the trainer sees this process as gone."""
        self._sock.close()


class _Decoder:
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


class Connection:
    """The trainer's end of one connection.

    Attributes:
        hello: how the peer introduced itself; empty until it has.
        decoder: puts together what it sends.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.hello: Message = {}
        self.decoder = _Decoder()
        self._sock = sock
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        """Send one frame; nothing if the peer is gone (its end is reported anyhow)."""
        with self._lock:
            try:
                self._sock.sendall(_encode(message))
            except OSError:
                log.debug("could not send %s to %s", list(message), self.hello.get("host"))

    def close(self) -> None:
        """End the connection; it is reported as closed."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            log.debug("connection was closed already")


class GateEvents:
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


class Gate:
    """Where the workers and supervisors of a run join: one listener, one thread for all.

    Attributes:
        events: who is told; may be replaced at any time.
    """

    def __init__(self, address: str, token: str, events: GateEvents, port: int = 0) -> None:
        """Listen on ``address`` alone.

        Raises:
            LaunchError: see :func:`~distcollect.network.listen`.
        """
        self.events = events
        self._token = token
        self._listener = listen(address, port)
        self._listener.setblocking(False)
        _open_sockets.add(self._listener)
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
        _configure(sock)
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


def exit_now(code: int) -> NoReturn:
    """End this process and all that it started, without waiting for anything.

    Only for a process that leads its own process group.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(code)
