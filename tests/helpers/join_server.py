"""A join server that records who joins and what is sent to it."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.marked import Marked
from helpers.paths import SCRIPTS

from distcollect.net.client import ControlConnection
from distcollect.net.framing import FrameReader, with_length
from distcollect.net.handshake import JoiningSide, Opening
from distcollect.net.messages import Hello, Message, WorkerHello, WorkerWelcome, to_bytes
from distcollect.net.server import Connection, JoinServer, JoinServerEvents

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
    assert not server_threads()


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
    client.sock.sendall(with_length(side.opening))
    client.sock.sendall(with_length(side.prove(read_frame(client.sock))))
    side.verify(read_frame(client.sock))


def read_frame(sock: socket.socket) -> bytes:
    """Return one frame; nothing else may have been sent."""
    reader = FrameReader()
    while (frame := reader.next()) is None:
        data = sock.recv(65536)
        assert data
        reader.feed(data)
    return frame


def server_threads() -> list[threading.Thread]:
    """Return the threads of the join servers in this process."""
    return [each for each in threading.enumerate() if each.name == "distcollect-join"]


def cpu_s() -> float:
    """Return the seconds that the join server's thread has computed for."""
    [thread] = server_threads()
    stat = Path(f"/proc/self/task/{thread.native_id}/stat").read_text()
    fields = stat.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


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
