"""Who may join the trainer, and what control connections carry."""

from __future__ import annotations

import errno
import json
import os
import socket
import struct
import threading
import time

import pytest
from helpers.join_server import (
    SOON_S,
    TOKEN,
    WELCOME,
    Connect,
    Recorder,
    connect,
    events,
    hello,
    prove,
    server,
)

import distcollect as dc
from distcollect.common.process_exit import ProcessExit
from distcollect.launch.supervisor import join
from distcollect.net.framing import with_length
from distcollect.net.handshake import Opening
from distcollect.net.interfaces import LOOPBACK
from distcollect.net.messages import (
    Exited,
    Goodbye,
    PeerAddress,
    Refused,
    SupervisorHello,
    TrainerAddress,
    to_bytes,
    versions,
)
from distcollect.net.server import Connection, JoinServer
from distcollect.transport.tcp import TcpTransport
from distcollect.transport.worker_service import WorkerService

__all__ = ["connect", "events", "server"]


def test_joins_and_exchanges_frames(server: JoinServer, events: Recorder, connect: Connect) -> None:
    client = connect(server)
    assert client.join(hello(worker_id=3), TOKEN) == WELCOME
    connection = events.next("admitted")
    assert connection.hello.worker_id == 3
    assert connection.hello.pid == os.getpid()
    for size in (0, 10, 200_000):
        exited = Exited(0, 2, ProcessExit(-9, 7, "x" * size))
        client.send(exited)
        assert events.next("received") == exited
        connection.send(Refused("y" * size))
        assert client.receive() == Refused("y" * size)
    client.close()
    assert events.next("closed") is connection


def test_a_host_that_cannot_be_reached_any_more_is_gone(
    server: JoinServer, events: Recorder, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel says so by an error that Python takes for a timeout."""
    client = connect(server)
    client.join(hello(), TOKEN)

    class Unplugged:
        def recv(self, size: int) -> bytes:
            raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))

    with monkeypatch.context() as patch:
        patch.setattr(client, "sock", Unplugged())
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
        client, found = join(
            lambda: addresses.pop(0),
            SupervisorHello(rank=None),
            20,
            name="this process",
            give_up_if_refused=True,
        )
        assert found.port == server.port
        client.close()


@pytest.mark.parametrize("token", ["", "another", TOKEN + "x", "\N{SNOWMAN}"])
def test_a_wrong_token_is_refused(
    server: JoinServer, events: Recorder, token: str, connect: Connect
) -> None:
    with pytest.raises(dc.LaunchError, match=r"refused this worker: .*token"):
        connect(server).join(hello(), token)
    assert "token" in events.next("refused")


@pytest.mark.parametrize("name", ["protocol", "python", "torch", "tensordict"])
def test_another_version_is_refused_naming_both(
    server: JoinServer, events: Recorder, name: str, connect: Connect
) -> None:
    reason = (
        f"its {name} is 0.99, the trainer's is {versions()[name]}; install the same on all hosts"
    )
    client = connect(server)
    prove(client, TOKEN, Opening({**versions(), name: "0.99"}))
    client.send(hello())
    assert client.receive() == Refused(reason)
    assert events.next("refused") == reason
    assert client.receive() is None


def test_garbage_after_joining_closes_the_connection(
    server: JoinServer, events: Recorder, connect: Connect
) -> None:
    client = connect(server)
    client.join(hello(), TOKEN)
    connection = events.next("admitted")
    client.sock.sendall(with_length(b"nonsense"))
    assert events.next("closed") is connection
    assert client.receive() is None


HELLO = json.loads(to_bytes(hello()))
BAD_FIELDS = {
    "unknown message": {**HELLO, "message": "Greeting"},
    "no message": {key: value for key, value in HELLO.items() if key != "message"},
    "not a hello": json.loads(to_bytes(Goodbye())),
    "missing field": {key: value for key, value in HELLO.items() if key != "incarnation"},
    "unknown field": {**HELLO, "more": 1},
    "text for a number": {**HELLO, "worker_id": "0"},
    "bool for a number": {**HELLO, "worker_id": True},
    "a field that is null": {**HELLO, "host": None},
}


@pytest.mark.parametrize("sent", BAD_FIELDS.values(), ids=BAD_FIELDS.keys())
def test_a_malformed_hello_is_refused(
    server: JoinServer, events: Recorder, sent: dict[str, object], connect: Connect
) -> None:
    client = connect(server)
    prove(client, TOKEN)
    client.sock.sendall(with_length(json.dumps(sent).encode()))
    answer = client.receive()
    assert isinstance(answer, Refused)
    assert answer.reason
    assert client.receive() is None
    events.next("refused")
    assert events.queue.empty()


class Nonsense:
    """Answers a question by this frame."""

    allocate = bytearray

    def __init__(self, connection: Connection, frame: bytes) -> None:
        self.received = lambda _: connection.sock.sendall(frame)
        self.ended = lambda: None
        connection.carry(self)


@pytest.mark.parametrize("frame", [b"\3\0\0\1x", b"\2\0\0\x10" + struct.pack("!QQ", 0, 1 << 62)])
def test_a_worker_of_another_trainer_that_sends_nonsense_owes_nothing(
    server: JoinServer, events: Recorder, frame: bytes
) -> None:
    """A part of a packet that is not there, or one for which there is no memory."""
    transport = TcpTransport(TOKEN)
    transport.connect(7, PeerAddress(f"127.0.0.1:{server.port}"))
    Nonsense(events.next("admitted"), frame)
    answer = transport.call(7, WorkerService.preempt, 1)
    with pytest.raises(dc.WorkerLost):
        answer.result(SOON_S)
    transport.close()


def test_says_what_it_waits_for(caplog: pytest.LogCaptureFixture) -> None:
    """After 5 s, and at once if nobody knows the host's name."""
    caplog.set_level("INFO", "distcollect")
    with socket.create_server((LOOPBACK, 0)) as closed:
        nobody = TrainerAddress(LOOPBACK, closed.getsockname()[1], TOKEN)
    for host, limit_s in ((nobody, 6.0), (TrainerAddress("no.such.invalid", 1, TOKEN), 0.1)):
        caplog.clear()
        with pytest.raises(dc.LaunchError, match="could not reach the trainer"):
            join(lambda host=host: host, SupervisorHello(rank=None), limit_s, name="this process")
        (record,) = caplog.records
        assert record.getMessage().startswith(
            f"this process waits up to {limit_s:g} s for the trainer, at {host.host}:{host.port}, "
            "and tries again: "
        )


def test_a_listener_that_does_not_answer_takes_no_longer_than_was_given() -> None:
    with socket.create_server((LOOPBACK, 0)) as silent:
        trainer = TrainerAddress(LOOPBACK, silent.getsockname()[1], TOKEN)
        begin = time.monotonic()
        with pytest.raises(dc.LaunchError, match=r"within 0\.5 s; .* did not answer the join"):
            join(lambda: trainer, SupervisorHello(rank=None), 0.5, name="this process")
        assert time.monotonic() - begin < 10
