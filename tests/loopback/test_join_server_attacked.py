"""What strangers, and peers that do not read, can take from a trainer: little, and for a while."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.join_server import (
    SOON_S,
    TOKEN,
    WELCOME,
    Connect,
    Listener,
    Recorder,
    connect,
    cpu_s,
    events,
    hello,
    prove,
    server,
)
from helpers.waiting import eventually

import distcollect as dc
from distcollect.net import server as server_module
from distcollect.net.client import ControlConnection
from distcollect.net.framing import MAX_FRAME, with_length
from distcollect.net.handshake import Challenge, JoiningSide, Opening, Proof
from distcollect.net.messages import Goodbye, Kill, Refused, to_bytes
from distcollect.net.server import Connection, JoinServer

__all__ = ["connect", "events", "server"]


Serve = Callable[..., JoinServer]


@pytest.fixture
def serve(events: Recorder, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Makes join servers whose module has other constants."""
    with contextlib.ExitStack() as opened:

        def serve(**constants: float) -> JoinServer:
            for name, value in constants.items():
                monkeypatch.setattr(server_module, name, value)
            server = JoinServer("127.0.0.1", TOKEN, events)
            opened.callback(server.close)
            return server

        yield serve


Dial = Callable[[JoinServer], socket.socket]


@pytest.fixture
def dial() -> Iterator[Dial]:
    with contextlib.ExitStack() as opened:

        def dial(server: JoinServer) -> socket.socket:
            sock = socket.create_connection(("127.0.0.1", server.port), timeout=SOON_S)
            return opened.enter_context(sock)

        yield dial


def is_ended(sock: socket.socket) -> bool:
    """Wait for the other side to close the connection."""
    try:
        while sock.recv(65536):
            pass
    except ConnectionResetError:
        pass
    except TimeoutError:
        return False
    return True


def test_a_refused_connection_is_closed_though_the_stranger_stays(
    server: JoinServer, events: Recorder, dial: Dial
) -> None:
    stranger = dial(server)
    stranger.sendall(with_length(b"{}") * 10_000)
    assert is_ended(stranger)
    eventually(lambda: not server.num_strangers)
    assert "token" in events.next("refused")
    assert events.queue.empty()


def test_what_a_stranger_says_is_no_command_to_a_terminal(
    server: JoinServer, events: Recorder, dial: Dial
) -> None:
    sent = {**json.loads(to_bytes(Opening())), "\x1b[2J\n": 1}
    dial(server).sendall(with_length(json.dumps(sent).encode()))
    assert events.next("refused").isprintable()


@pytest.mark.parametrize("sent", [b"", b"\0\0\1", to_bytes(Opening())[:50]], ids=len)
def test_a_silent_stranger_is_closed(
    serve: Serve, connect: Connect, dial: Dial, sent: bytes
) -> None:
    server = serve(HANDSHAKE_TIMEOUT_S=0.5)
    stranger = dial(server)
    stranger.sendall(sent)
    assert is_ended(stranger)
    proven, client = connect(server), connect(server)
    prove(proven)
    client.join(hello(), TOKEN)
    assert proven.receive() is None
    time.sleep(1.0)  # longer than a stranger's time
    assert not is_closed(client)


def is_closed(client: ControlConnection) -> bool:
    client.sock.settimeout(0.01)
    try:
        return client.sock.recv(1) == b""
    except TimeoutError:
        return False


def test_strangers_do_not_keep_workers_out(serve: Serve, connect: Connect, dial: Dial) -> None:
    """Above the limit the oldest stranger is closed, not the newest."""
    server = serve(MAX_STRANGERS=8, _STRANGERS_PER_S=1e6)
    workers = [connect(server) for _ in range(3)]
    for worker in workers:
        worker.join(hello(), TOKEN)
    strangers = [dial(server) for _ in range(30)]
    late = connect(server)
    assert late.join(hello(), TOKEN) == WELCOME
    assert all(is_ended(stranger) for stranger in strangers[:22])
    assert server.num_strangers <= 8
    assert not any(is_closed(worker) for worker in workers)


def test_connections_without_a_proof_are_accepted_at_a_rate(
    serve: Serve, connect: Connect, dial: Dial
) -> None:
    """Processes that prove the token do not count, however many there are."""
    server = serve(MAX_STRANGERS=20, _STRANGERS_PER_S=0.001)
    for _ in range(100):
        client = connect(server)
        client.join(hello(), TOKEN)
        client.close()
    strangers = [dial(server) for _ in range(50)]
    assert [is_ended(stranger) for stranger in strangers[:20]] == [True] * 20
    time.sleep(0.5)
    assert server.num_strangers == 20  # and 10 are not accepted yet


@pytest.mark.parametrize(
    "sent",
    [with_length(b"x" * 4097)[:4], with_length(b" " * 4000 + b"{}"), b"\0\0\x0f\0" + b"x" * 100],
    ids=["too long", "no opening", "half"],
)
def test_a_stranger_may_send_little(server: JoinServer, dial: Dial, sent: bytes) -> None:
    stranger = dial(server)
    for n in range(len(sent)):
        try:
            stranger.send(sent[n : n + 1])
        except OSError:
            break
        time.sleep(0.001)
    assert is_ended(stranger)


def admitted_without_reading(client: ControlConnection, events: Recorder) -> Connection:
    """The server's end of a connection whose peer joins, and then reads nothing.

    The kernel keeps little of what the server sends; without limits, some kernels keep 30 MB.
    """
    client.join(hello(), TOKEN)
    connection: Connection = events.next("admitted")
    client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
    return connection


def test_one_that_does_not_read_holds_nobody_up(
    serve: Serve, events: Recorder, connect: Connect
) -> None:
    server = serve(SEND_TIMEOUT_S=2.0)
    to_deaf = admitted_without_reading(connect(server), events)
    other = connect(server)
    other.join(hello(worker_id=1), TOKEN)
    to_other = events.next("admitted")
    large = Refused("x" * 500_000)
    for _ in range(4):  # more than the kernel keeps
        to_deaf.send(large)
    to_other.send(Goodbye())
    assert other.receive() == Goodbye()
    other.send(Kill(1, 2))
    assert events.next("received") == Kill(1, 2)
    assert events.queue.get(timeout=SOON_S) == ("closed", to_deaf)


def test_one_that_reads_slowly_gets_everything(
    server: JoinServer, events: Recorder, connect: Connect
) -> None:
    """Also what the server had still to send when it was closed."""
    client = connect(server)
    client.join(hello(), TOKEN)
    connection = events.next("admitted")
    sent = [Refused(f"{n}" * 100_000) for n in range(9)]
    for message in sent[:5]:
        connection.send(message)
    assert [client.receive() for _ in range(3)] == sent[:3]
    for message in sent[5:]:
        connection.send(message)
    closing = threading.Thread(target=server.close)
    closing.start()
    assert [client.receive() for _ in range(6)] == sent[3:]
    assert client.receive() is None
    closing.join(SOON_S)


def test_what_is_kept_for_one_that_does_not_read_is_limited(
    serve: Serve, events: Recorder, connect: Connect
) -> None:
    server = serve(SEND_TIMEOUT_S=3600)  # so it is the limit that ends the connection
    connection = admitted_without_reading(connect(server), events)
    num_unsent = []
    for _ in range(30):
        connection.send(Refused("x" * 500_000))
        num_unsent.append(connection.outbox.num_unsent)
    assert 7 * MAX_FRAME < max(num_unsent) <= 8 * MAX_FRAME
    assert events.next("closed") is connection
    assert connection.outbox.num_unsent == 0


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """This process can open no more files."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as held:
        held.callback(resource.setrlimit, resource.RLIMIT_NOFILE, before)
        highest = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 2, before[1]))
        with contextlib.suppress(OSError):
            while True:
                held.callback(os.close, os.dup(0))
        yield


def test_a_server_out_of_descriptors_waits_and_goes_on(
    server: JoinServer, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    """It logs some lines, uses little time of its thread, and accepts when it can again."""
    caplog.set_level(logging.WARNING)
    used = cpu_s()
    with socket.socket() as early, no_descriptors():
        early.settimeout(SOON_S)
        early.connect(("127.0.0.1", server.port))
        eventually(lambda: "connection was not accepted" in caplog.text)
        time.sleep(2.0)
    assert cpu_s() - used < 0.5
    assert 1 <= len(caplog.records) <= 20
    assert connect(server).join(hello(), TOKEN) == WELCOME


def test_a_stranger_makes_room_when_descriptors_run_out(
    server: JoinServer, connect: Connect, dial: Dial
) -> None:
    strangers = [dial(server) for _ in range(3)]
    eventually(lambda: server.num_strangers == 3)
    with socket.socket() as early, no_descriptors():
        early.settimeout(SOON_S)
        early.connect(("127.0.0.1", server.port))
        early.sendall(with_length(to_bytes(Opening())))
        assert early.recv(1)
    assert is_ended(strangers[0])


def test_a_flood_of_refusals_is_reported_as_a_number(serve: Serve, events: Recorder) -> None:
    server = serve(_REPORT_PERIOD_S=3.0, _STRANGERS_PER_S=1e6)
    for _ in range(100):
        with socket.create_connection(("127.0.0.1", server.port)) as sock:
            sock.sendall(with_length(b"{}"))
            assert sock.recv(1)
    reports = []
    while not reports or "more connections were refused" not in reports[-1]:
        kind, reason = events.queue.get(timeout=SOON_S)
        assert kind == "refused"
        reports.append(reason)
    assert "127.0.0.1" in reports[0]
    assert len(reports) <= 1 + 10 * (1 + SOON_S / 3)
    if len(reports) == 11:  # all within one period
        assert reports[-1] == "90 more connections were refused (within 3 s)"


# What a process that joins does with a listener that is not its trainer.


def opening_and_proof(answer: Callable[[bytes], bytes]) -> tuple[Listener, list[bytes]]:
    """A listener that challenges, and answers a proof by ``answer``; and what it was sent."""
    received: list[bytes] = []

    def impostor(sock: socket.socket, opening: bytes) -> None:
        received.append(opening)
        sock.sendall(with_length(to_bytes(Challenge())))
        received.append(sock.recv(65536))
        sock.sendall(answer(received[-1]))
        received.append(sock.recv(65536))

    return Listener(impostor), received


IMPOSTORS: dict[str, Callable[[bytes], bytes]] = {
    "reflects the proof": lambda proof: proof,
    "makes one up": lambda _: with_length(to_bytes(Proof("0" * 64))),
    "knows another token": lambda _: with_length(JoiningSide("x").prove(to_bytes(Challenge()))),
    "welcomes": lambda _: with_length(
        b'{"message":"WorkerWelcome","peer":1,"trainer_memory":null}'
    ),
}


@pytest.mark.parametrize("answer", IMPOSTORS.values(), ids=IMPOSTORS.keys())
def test_a_process_says_nothing_of_itself_to_an_impostor(
    connect: Connect, answer: Callable[[bytes], bytes]
) -> None:
    listener, received = opening_and_proof(answer)
    with listener:
        client = connect(port=listener.port)
        with pytest.raises(dc.LaunchError, match=r"what listens at 127.0.0.1:\d+ is "):
            client.join(hello(), TOKEN)
        client.close()
        eventually(lambda: len(received) == 3)
    assert received[2] == b""
    assert TOKEN.encode() not in b"".join(received)
    assert b"worker_id" not in b"".join(received)


def test_an_answer_that_never_ends_is_not_waited_for(connect: Connect) -> None:
    def drip(sock: socket.socket, opening: bytes) -> None:
        sock.sendall(b"\0\0\x0f\0")
        with contextlib.suppress(OSError):
            while True:
                sock.sendall(b"\0")
                time.sleep(0.05)

    with Listener(drip) as listener:
        client = connect(port=listener.port)
        with pytest.raises(ConnectionError, match="did not answer"):
            client.join(hello(), TOKEN, timeout_s=0.5)
        client.close()


def test_an_impostor_may_send_little(connect: Connect) -> None:
    with Listener(lambda sock, _: sock.sendall(with_length(bytes(5000))[:4])) as listener:
        client = connect(port=listener.port)
        with pytest.raises(dc.LaunchError, match="5000 bytes"):
            client.join(hello(), TOKEN, timeout_s=SOON_S)


def test_a_refusal_is_shown_without_control_characters(connect: Connect) -> None:
    text = b'{"message": "Refused", "reason": "\\u001b[2Jgone\\n"}'
    with Listener(lambda sock, _: sock.sendall(with_length(text))) as listener:
        client = connect(port=listener.port)
        with pytest.raises(dc.LaunchError, match=r"\?\[2Jgone\?") as raised:
            client.join(hello(), TOKEN)
        assert str(raised.value).isprintable()
