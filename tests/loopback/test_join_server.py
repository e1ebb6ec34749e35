"""Who may join the trainer, and what a control connection carries."""

from __future__ import annotations

import errno
import os
import socket
import struct
import threading

import pytest
from helpers.join_server import (
    SOON_S,
    TOKEN,
    Connect,
    Recorder,
    connect,
    events,
    gate,
    hello,
)

import distcollect as dc
from distcollect.launch.rendezvous import TrainerAddress
from distcollect.launch.supervisor import join
from distcollect.net.framing import versions
from distcollect.net.server import JoinServer

__all__ = ["connect", "events", "gate"]


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
