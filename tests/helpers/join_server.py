"""A join server that records who joins and what is sent to it."""

from __future__ import annotations

import contextlib
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers.marked import Marked
from helpers.paths import SCRIPTS

from distcollect.net.client import ControlConnection
from distcollect.net.connection import Connection
from distcollect.net.framing import with_length
from distcollect.net.handshake import JoiningSide, Opening, to_bytes
from distcollect.net.messages import Hello, Message, WorkerHello, WorkerWelcome
from distcollect.net.server import JoinServer, JoinServerEvents

SOON_S = 60  # for what takes a moment, except on a machine that is very busy
TOKEN = "a token"
WELCOME = WorkerWelcome(peer=1, trainer_memory=None)
SCRIPT = SCRIPTS / "hold_control_connection.py"


class Recorder(JoinServerEvents):
    """Keeps what a join server reports."""

    def __init__(self) -> None:
        self.queue: queue.Queue[tuple[str, Any]] = queue.Queue()

    def admit(self, connection: Connection) -> Message:
        self.queue.put(("admitted", connection))
        return WELCOME

    def refused(self, hello: Hello | None, reason: str) -> None:
        self.queue.put(("refused", reason))

    def received(self, connection: Connection, message: Message) -> None:
        self.queue.put(("received", message))

    def closed(self, connection: Connection) -> None:
        self.queue.put(("closed", connection))

    def next(self, kind: str) -> Any:
        got, what = self.queue.get(timeout=SOON_S)
        assert got == kind
        return what


@pytest.fixture
def events() -> Recorder:
    return Recorder()


@pytest.fixture
def server(events: Recorder) -> Iterator[JoinServer]:
    server = JoinServer("127.0.0.1", TOKEN, events)
    yield server
    server.close()
    assert not server._thread.is_alive()


Connect = Callable[..., ControlConnection]


@pytest.fixture
def connect() -> Iterator[Connect]:
    with contextlib.ExitStack() as opened:

        def connect(server: JoinServer | None = None, port: int = 0) -> ControlConnection:
            client = ControlConnection("127.0.0.1", server.port if server else port, SOON_S)
            opened.callback(client.close)
            return client

        yield connect


def prove(client: ControlConnection, token: str = TOKEN, opening: Opening | None = None) -> None:
    """The joining side of the handshake, without a Hello."""
    side = JoiningSide(token)
    if opening is not None:
        side.opening = to_bytes(opening)
    client._send(with_length(side.opening))
    challenge = client._receive_frame()
    assert challenge is not None
    client._send(with_length(side.prove(challenge)))
    proof = client._receive_frame()
    assert proof is not None
    side.verify(proof)


class Listener:
    """A listener that is no join server: ``answer`` gets each connection and its first bytes."""

    def __init__(self, answer: Callable[[socket.socket, bytes], object]) -> None:
        self._answer = answer
        self._sock = socket.create_server(("127.0.0.1", 0))
        self.port = self._sock.getsockname()[1]
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._sock.accept()
                with sock:
                    self._answer(sock, sock.recv(65536))

    def __enter__(self) -> Listener:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        self._thread.join(SOON_S)


def hello(**changes: Any) -> WorkerHello:
    return WorkerHello(**{"worker_id": 0, "incarnation": 0, **changes})


def start(marked: Marked, *args: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *map(str, args)], stdout=subprocess.PIPE, text=True
    )
