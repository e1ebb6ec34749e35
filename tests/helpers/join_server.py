"""A server that records who joins, and what is sent to it."""

from __future__ import annotations

import contextlib
import queue
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers.marked import Marked
from helpers.paths import SCRIPTS

from distcollect.net.client import ControlConnection
from distcollect.net.framing import Message, versions
from distcollect.net.server import Connection, JoinServer, JoinServerEvents

SOON_S = 5
TOKEN = "a token"
SCRIPT = SCRIPTS / "hold_control_connection.py"


class Recorder(JoinServerEvents):
    """Keeps what a gate reports."""

    def __init__(self) -> None:
        self.queue: queue.Queue[tuple[str, Any]] = queue.Queue()

    def admit(self, connection: Connection) -> Message:
        self.queue.put(("admitted", connection))
        return {"welcome": connection.hello["role"]}

    def refused(self, hello: Message, reason: str) -> None:
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
def gate(events: Recorder) -> Iterator[JoinServer]:
    gate = JoinServer("127.0.0.1", TOKEN, events)
    yield gate
    gate.close()
    assert not gate._thread.is_alive()


Connect = Callable[..., ControlConnection]


@pytest.fixture
def connect() -> Iterator[Connect]:
    with contextlib.ExitStack() as opened:

        def connect(gate: JoinServer | None = None, port: int = 0) -> ControlConnection:
            lifeline = ControlConnection("127.0.0.1", gate.port if gate else port, SOON_S)
            opened.callback(lifeline.close)
            return lifeline

        yield connect


def hello(**changes: Any) -> dict[str, Any]:
    return {"role": "worker", "token": TOKEN, "versions": versions(), **changes}


def start(marked: Marked, *args: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *map(str, args)], stdout=subprocess.PIPE, text=True
    )
