"""Who may join the trainer, and what control connections carry."""

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
    hello,
    server,
)

import distcollect as dc
from distcollect.launch.rendezvous import TrainerAddress
from distcollect.launch.supervisor import join
from distcollect.net.framing import versions
from distcollect.net.server import JoinServer

__all__ = ["connect", "events", "server"]


def frame(data: bytes, length: int | None = None) -> bytes:
    return struct.pack("!I", len(data) if length is None else length) + data


def test_joins_and_exchanges_frames(server: JoinServer, events: Recorder, connect: Connect) -> None:
    client = connect(server)
    assert client.join("worker", TOKEN, worker_id=3) == {"welcome": "worker"}
    connection = events.next("admitted")
    assert connection.hello["worker_id"] == 3
    assert connection.hello["pid"] == os.getpid()
    for size in (0, 10, 200_000):
        client.send({"text": "x" * size})
        assert events.next("received") == {"text": "x" * size}
        connection.send({"reply": "y" * size})
        assert client.receive() == {"reply": "y" * size}
    client.close()
    assert events.next("closed") is connection


def test_a_host_that_cannot_be_reached_any_more_is_gone(
    server: JoinServer, events: Recorder, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel says so by an error that Python takes for a timeout."""
    client = connect(server)
    client.join("worker", TOKEN)

    class Unplugged:
        def recv(self, size: int) -> bytes:
            raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))

    with monkeypatch.context() as patch:
        patch.setattr(client, "_sock", Unplugged())
        assert client.receive() is None


def test_a_supervisor_tries_again_when_the_handshake_breaks_off(
    server: JoinServer, events: Recorder
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as breaks_off:
        ports = [breaks_off.getsockname()[1], server.port]
        addresses = [TrainerAddress("127.0.0.1", port, TOKEN) for port in ports]

        def break_off() -> None:
            breaks_off.accept()[0].close()

        threading.Thread(target=break_off, daemon=True).start()
        client, address = join(lambda: addresses.pop(0), None, 20, give_up_if_refused=True)
        assert address.port == server.port
        client.close()


def test_the_gates_end_ends_all_lifelines(
    server: JoinServer, events: Recorder, connect: Connect
) -> None:
    clients = [connect(server) for _ in range(3)]
    for client in clients:
        client.join("worker", TOKEN)
    server.close()
    assert [client.receive() for client in clients] == [None] * 3
    with pytest.raises(OSError, match="refused"):
        connect(server)


@pytest.mark.parametrize("token", ["", "another", TOKEN + "x", "\N{SNOWMAN}"])
def test_a_wrong_token_is_refused(
    server: JoinServer, events: Recorder, token: str, connect: Connect
) -> None:
    with pytest.raises(dc.LaunchError, match=r"refused this worker: .*token"):
        connect(server).join("worker", token)
    assert "token" in events.next("refused")


@pytest.mark.parametrize("name", ["protocol", "python", "torch", "tensordict"])
def test_another_version_is_refused_naming_both(
    server: JoinServer, events: Recorder, name: str, connect: Connect
) -> None:
    client = connect(server)
    client.send(hello(versions={**versions(), name: "0.99"}))
    reason = (
        f"its {name} is 0.99, the trainer's is {versions()[name]}; install the same on all hosts"
    )
    assert client.receive() == {"refused": reason}
    assert events.next("refused") == reason
    assert client.receive() is None


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
    server: JoinServer, events: Recorder, garbage: bytes, ended: bool, connect: Connect
) -> None:
    before = connect(server)
    before.join("worker", TOKEN)
    events.next("admitted")
    with socket.create_connection((server.address, server.port)) as sock:
        sock.sendall(garbage)
        if ended:
            sock.shutdown(socket.SHUT_RDWR)
        after = connect(server)
        after.join("worker", TOKEN)
        before.send({"still": "here"})
        while (got := events.queue.get(timeout=SOON_S))[0] != "received":
            assert got[0] in {"refused", "admitted"}
        assert got[1] == {"still": "here"}


def test_garbage_after_joining_closes_the_connection(
    server: JoinServer, events: Recorder, connect: Connect
) -> None:
    client = connect(server)
    client.join("worker", TOKEN)
    connection = events.next("admitted")
    client._sock.sendall(frame(b"nonsense"))
    assert events.next("closed") is connection
    assert client.receive() is None


def test_frames_come_whole_however_they_are_cut(
    server: JoinServer, events: Recorder, connect: Connect
) -> None:
    client = connect(server)
    client.join("worker", TOKEN)
    events.next("admitted")
    data = frame(b'{"n": 1}') + frame(b'{"n": 2}') + frame(b'{"n": 3}')
    for start in range(0, len(data), 5):
        client._sock.sendall(data[start : start + 5])
    assert [events.next("received")["n"] for _ in range(3)] == [1, 2, 3]
