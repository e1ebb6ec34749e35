"""The join handshake, and that each side sees the other's end however it comes."""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers.paths import SCRIPTS
from helpers.scripts.marked import Marked

import distcollect as dc
from distcollect.launch.rendezvous import TrainerAddress
from distcollect.launch.supervisor import join
from distcollect.net.client import ControlConnection
from distcollect.net.framing import Message, versions
from distcollect.net.server import Connection, JoinServer, JoinServerEvents

SOON_S = 5
TOKEN = "a token"
SCRIPT = SCRIPTS / "link_end.py"


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


def frame(data: bytes, length: int | None = None) -> bytes:
    return struct.pack("!I", len(data) if length is None else length) + data


def test_joins_and_exchanges_frames(gate: JoinServer, events: Recorder, connect: Connect) -> None:
    lifeline = connect(gate)
    assert lifeline.join("worker", TOKEN, worker_id=3) == {"welcome": "worker"}
    connection = events.next("admitted")
    assert connection.hello["worker_id"] == 3
    assert connection.hello["pid"] == os.getpid()
    for size in (0, 10, 200_000):
        lifeline.send({"text": "x" * size})
        assert events.next("received") == {"text": "x" * size}
        connection.send({"reply": "y" * size})
        assert lifeline.receive() == {"reply": "y" * size}
    lifeline.close()
    assert events.next("closed") is connection


def test_a_host_that_cannot_be_reached_any_more_is_gone(
    gate: JoinServer, events: Recorder, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel says so by an error that Python takes for a timeout."""
    lifeline = connect(gate)
    lifeline.join("worker", TOKEN)

    class Unplugged:
        def recv(self, size: int) -> bytes:
            raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))

    with monkeypatch.context() as patch:
        patch.setattr(lifeline, "_sock", Unplugged())
        assert lifeline.receive() is None


def test_a_supervisor_tries_again_when_the_handshake_breaks_off(
    gate: JoinServer, events: Recorder
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as breaks_off:
        ports = [breaks_off.getsockname()[1], gate.port]
        meetings = [TrainerAddress("127.0.0.1", port, TOKEN) for port in ports]

        def break_off() -> None:
            breaks_off.accept()[0].close()

        threading.Thread(target=break_off, daemon=True).start()
        lifeline, meeting = join(lambda: meetings.pop(0), None, 20, give_up_if_refused=True)
        assert meeting.port == gate.port
        lifeline.close()


def test_the_gates_end_ends_all_lifelines(
    gate: JoinServer, events: Recorder, connect: Connect
) -> None:
    lifelines = [connect(gate) for _ in range(3)]
    for lifeline in lifelines:
        lifeline.join("worker", TOKEN)
    gate.close()
    assert [lifeline.receive() for lifeline in lifelines] == [None] * 3
    with pytest.raises(OSError, match="refused"):
        connect(gate)


@pytest.mark.parametrize("token", ["", "another", TOKEN + "x", "\N{SNOWMAN}"])
def test_a_wrong_token_is_refused(
    gate: JoinServer, events: Recorder, token: str, connect: Connect
) -> None:
    with pytest.raises(dc.LaunchError, match=r"refused this worker: .*token"):
        connect(gate).join("worker", token)
    assert "token" in events.next("refused")


@pytest.mark.parametrize("name", ["protocol", "python", "torch", "tensordict"])
def test_another_version_is_refused_naming_both(
    gate: JoinServer, events: Recorder, name: str, connect: Connect
) -> None:
    lifeline = connect(gate)
    lifeline.send(hello(versions={**versions(), name: "0.99"}))
    reason = (
        f"its {name} is 0.99, the trainer's is {versions()[name]}; install the same on all hosts"
    )
    assert lifeline.receive() == {"refused": reason}
    assert events.next("refused") == reason
    assert lifeline.receive() is None


GARBAGE = {
    "noise": bytes(range(256)) * 10,
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "oversized": frame(b"", length=2**31),
    "not json": frame(b"\x80not json"),
    "not utf-8": frame(b'"\xff\xfe"'),
    "a number": frame(b"1"),
    "null": frame(b"null"),
    "a list": frame(b"[1, 2]"),
    "empty frame": frame(b""),
    "empty object": frame(b"{}"),
    "nested": frame(b"[" * 100_000),
    "no token": frame(b'{"role": "worker"}'),
    "a token that is no text": frame(b'{"token": 1}'),
    "a surrogate": frame(b'{"token": "\\ud800"}'),
    "versions that are no object": frame(b'{"token": "a token", "versions": 5}'),
    "half a length": b"\0\0",
    "half a frame": frame(b'{"tok', length=100),
}


@pytest.mark.parametrize("ended", [True, False], ids=["ended", "held open"])
@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_does_no_harm(
    gate: JoinServer, events: Recorder, garbage: bytes, ended: bool, connect: Connect
) -> None:
    before = connect(gate)
    before.join("worker", TOKEN)
    events.next("admitted")
    with socket.create_connection((gate.address, gate.port)) as sock:
        sock.sendall(garbage)
        if ended:
            sock.shutdown(socket.SHUT_RDWR)
        after = connect(gate)
        after.join("worker", TOKEN)
        before.send({"still": "here"})
        while (got := events.queue.get(timeout=SOON_S))[0] != "received":
            assert got[0] in {"refused", "admitted"}
        assert got[1] == {"still": "here"}


def test_garbage_after_joining_closes_the_connection(
    gate: JoinServer, events: Recorder, connect: Connect
) -> None:
    lifeline = connect(gate)
    lifeline.join("worker", TOKEN)
    connection = events.next("admitted")
    lifeline._sock.sendall(frame(b"nonsense"))
    assert events.next("closed") is connection
    assert lifeline.receive() is None


def test_frames_come_whole_however_they_are_cut(
    gate: JoinServer, events: Recorder, connect: Connect
) -> None:
    lifeline = connect(gate)
    lifeline.join("worker", TOKEN)
    events.next("admitted")
    data = frame(b'{"n": 1}') + frame(b'{"n": 2}') + frame(b'{"n": 3}')
    for start in range(0, len(data), 5):
        lifeline._sock.sendall(data[start : start + 5])
    assert [events.next("received")["n"] for _ in range(3)] == [1, 2, 3]


# Ends of processes. The script joins, or serves a gate, as told; with "fork" it first forks a
# child that inherits all its descriptors and outlives it.


def start(marked: Marked, *args: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *map(str, args)], stdout=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("fork", ["", "fork"])
def test_the_gate_sees_a_process_end(
    gate: JoinServer, events: Recorder, marked: Marked, fork: str
) -> None:
    process = start(marked, "join", gate.address, gate.port, TOKEN, fork)
    assert process.stdout is not None
    connection = events.queue.get(timeout=30)[1]
    assert process.stdout.readline() == "ready\n"
    process.kill()
    assert events.next("closed") is connection
    process.wait(SOON_S)
    assert len(marked.pids()) == bool(fork)
    process.stdout.close()


@pytest.mark.parametrize("how", ["kill", "close"])
@pytest.mark.parametrize("fork", ["", "fork"])
def test_a_lifeline_sees_the_gate_end(
    marked: Marked, connect: Connect, how: str, fork: str
) -> None:
    """Whether its process ends or it is closed; what the process has forked changes nothing."""
    process = start(marked, "gate", TOKEN, fork)
    assert process.stdout is not None
    lifeline = connect(port=int(process.stdout.readline()))
    lifeline.join("worker", TOKEN)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGKILL if how == "kill" else signal.SIGTERM)
    lifeline._sock.settimeout(3)
    try:
        assert lifeline.receive() is None
    finally:
        process.kill()
        process.wait(SOON_S)
        process.stdout.close()
    assert len(marked.pids()) == bool(fork)
