"""Joining over TLS: who is in between gets nothing, and what strangers send is refused."""

from __future__ import annotations

import _ssl
import contextlib
import ctypes
import re
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.join_server import (
    SOON_S,
    TOKEN,
    WELCOME,
    Connect,
    Listener,
    Recorder,
    connect,
    events,
    hello,
    server_threads,
)

from distcollect.common.threads import run_aside
from distcollect.errors import ArgumentError, DistCollectError, LaunchError
from distcollect.net.framing import FrameReader, Outbox, Packet, with_length
from distcollect.net.handshake import JoiningSide, Opening, StartTls
from distcollect.net.messages import Kill, Refused, decode, encode, to_bytes
from distcollect.net.server import JoinServer
from distcollect.net.tls import TlsSocket, joining_tls, trainer_tls

CERTIFICATE = str(Path(__file__).parents[1] / "helpers" / "certificate.pem")

__all__ = ["connect", "events"]


@pytest.fixture
def server(events: Recorder, monkeypatch: pytest.MonkeyPatch) -> Iterator[JoinServer]:
    """One that uses TLS, with a certificate of the user's."""
    monkeypatch.setenv("DISTCOLLECT_TLS_CERT", CERTIFICATE)
    server = JoinServer("127.0.0.1", TOKEN, events, tls=trainer_tls("127.0.0.1", "tls"))
    yield server
    server.close()
    assert not server_threads()


def start_tls(port: int, **versions: Any) -> ssl.SSLSocket:
    """Begin to join: until TLS's own handshake, and with it."""
    sock = socket.create_connection(("127.0.0.1", port), SOON_S)
    sock.sendall(encode(Opening()))
    assert decode(read(sock)) == StartTls()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    for name, version in versions.items():
        setattr(context, name, version)
    return context.wrap_socket(sock)


def read(sock: socket.socket) -> bytes:
    reader = FrameReader()
    while (frame := reader.next()) is None:
        assert reader.receive(sock), "it was closed"
    assert isinstance(frame, bytes)
    return frame


def is_closed(sock: socket.socket) -> bool:
    """Whether the other side closes it, or sends no more than why."""
    with contextlib.suppress(OSError):
        while data := sock.recv(65536):
            assert b"Refused" in data
    return True


def test_a_process_joins_and_messages_pass(
    server: JoinServer,
    events: Recorder,
    connect: Connect,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    # The certificate is its own authority. A name may stand above it, as in bundles of systems.
    authority = tmp_path / "authority.pem"
    authority.write_bytes("# Autorité\n".encode("latin-1") + Path(CERTIFICATE).read_bytes())
    monkeypatch.setenv("DISTCOLLECT_TLS_CA", str(authority))
    client = connect(server)
    assert client.join(hello(), TOKEN) == WELCOME
    connection = events.next("admitted")
    for number in range(100):
        client.send(Kill(number, 0))
        assert events.next("received") == Kill(number, 0)
    for number in range(100):
        connection.send(Kill(number, 1))
    assert [client.receive() for _ in range(100)] == [Kill(number, 1) for number in range(100)]
    client.close()
    assert events.next("closed") is connection


def test_nobody_in_between_can_relay(
    server: JoinServer, events: Recorder, connect: Connect
) -> None:
    """He speaks TLS with both, and passes on what each of them sends."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*[another_certificate()] * 2)

    def relay(sock: socket.socket, _: bytes) -> None:
        sock.sendall(encode(StartTls()))
        with (
            contextlib.suppress(AssertionError, OSError),
            context.wrap_socket(sock, server_side=True) as victim,
            start_tls(server.port) as here,
        ):
            while True:
                here.sendall(with_length(read(victim)))
                victim.sendall(with_length(read(here)))

    refused = "refused this worker: it doesn't have this run's token"
    with Listener(relay) as listener:
        client = connect(port=listener.port)
        with pytest.raises(LaunchError, match=refused):
            client.join(hello(), TOKEN)
        client.close()
    assert "another one" in events.next("refused")


def shake_hands(sock: TlsSocket) -> None:
    while True:
        with contextlib.suppress(BlockingIOError):
            return sock.do_handshake()


def test_what_comes_after_the_end_is_read_within_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the rest of a rollout would be filled with ciphertext, or with what a stranger sends."""
    monkeypatch.setenv("DISTCOLLECT_TLS_CERT", CERTIFICATE)
    tls = trainer_tls("127.0.0.1", "tls")
    assert tls is not None
    ours, theirs = socket.socketpair()
    ours.settimeout(SOON_S)
    trainer = TlsSocket(ours, tls.context, is_trainer=True)
    shaking = run_aside(shake_hands, trainer)
    worker = joining_tls(theirs, time.monotonic() + SOON_S)
    assert shaking is not None
    shaking.join()
    worker.sendmsg([memoryview(b"some frames")])
    Outbox(trainer, 1).end()
    assert trainer.recv(65536) == b"some frames"
    trainer.close()
    worker.close()


def test_a_listener_that_trickles_keeps_nobody_who_joins() -> None:
    ours, theirs = socket.socketpair()
    is_over = threading.Event()

    def trickle() -> None:
        ours.send(b"\x16\x03\x03\x3f\xff")  # a record of 16 KB begins
        while not is_over.wait(0.05):
            ours.send(b"\x02")

    trickling = run_aside(trickle)
    begin = time.monotonic()
    with pytest.raises(TimeoutError):
        joining_tls(theirs, begin + 0.5)
    assert time.monotonic() - begin < SOON_S
    is_over.set()
    assert trickling is not None
    trickling.join()
    for each in (ours, theirs):
        each.close()


def another_certificate() -> str:
    return str(Path(CERTIFICATE).with_name("another_certificate.pem"))


@pytest.mark.parametrize(
    ("authority", "refused"),
    [
        (another_certificate(), "LaunchError: .*its certificate is refused"),
        ("no.pem", "ArgumentError: DISTCOLLECT_TLS_CA=no.pem can't be used .No such file"),
        (__file__, "ArgumentError: .* does not contain a certificate.*: name a file of cert"),
    ],
)
def test_an_authority_that_did_not_sign_is_an_error(
    server: JoinServer, connect: Connect, monkeypatch: Any, authority: str, refused: str
) -> None:
    monkeypatch.setenv("DISTCOLLECT_TLS_CA", authority)
    with pytest.raises(DistCollectError) as caught:
        connect(server).join(hello(), TOKEN)
    assert re.match(refused, f"{caught.typename}: {caught.value}")


@pytest.mark.parametrize("variable", ["DISTCOLLECT_TLS_CA", "DISTCOLLECT_SECURITY"])
def test_who_wants_tls_joins_no_trainer_without(
    events: Recorder, connect: Connect, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    server = JoinServer("127.0.0.1", TOKEN, events)
    try:
        value = {"DISTCOLLECT_TLS_CA": CERTIFICATE, "DISTCOLLECT_SECURITY": "tls"}[variable]
        monkeypatch.setenv(variable, value)
        with pytest.raises(LaunchError, match="does not encrypt connections"):
            connect(server).join(hello(), TOKEN)
    finally:
        server.close()


def test_strangers_are_refused_and_who_has_joined_does_not_notice(
    server: JoinServer, events: Recorder, connect: Connect
) -> None:
    client = connect(server)
    client.join(hello(), TOKEN)
    events.next("admitted")

    # A handshake without TLS, whatever the trainer says.
    with socket.create_connection(("127.0.0.1", server.port), SOON_S) as plain:
        side = JoiningSide(TOKEN)
        plain.sendall(with_length(side.opening))
        assert decode(read(plain)) == StartTls()
        plain.sendall(with_length(side.opening) + bytes(100))
        with contextlib.suppress(OSError):
            while plain.recv(65536):  # an alert of TLS
                pass
    # An earlier TLS.
    with (
        pytest.raises(ssl.SSLError),
        start_tls(server.port, maximum_version=ssl.TLSVersion.TLSv1_2),
    ):
        pass
    # Another token, and a proof that was made for another certificate, or for none.
    tls = trainer_tls("127.0.0.1", "tls")
    assert tls is not None
    for token, fingerprint in (("another", tls.fingerprint), (TOKEN, b"x" * 32), (TOKEN, b"")):
        with start_tls(server.port) as sock:
            side = JoiningSide(token, fingerprint)
            sock.sendall(with_length(side.opening))
            sock.sendall(with_length(side.prove(read(sock))))
            assert isinstance(decode(read(sock)), Refused)
            assert "another one" in events.next("refused")
    # What is only sent after the proof, such as what would be unpickled.
    with start_tls(server.port) as sock:
        sock.sendall(b"\x01\0\0\x10" + bytes(16))
        assert is_closed(sock)
        assert "not part of distcollect" in events.next("refused")

    client.send(Kill(1, 2))
    assert events.next("received") == Kill(1, 2)


def test_strangers_that_leave_as_tls_begins_do_not_end_the_server(
    server: JoinServer, events: Recorder, connect: Connect
) -> None:
    """Then there is nothing to make a connection with TLS of."""
    for _ in range(200):
        with socket.create_connection(("127.0.0.1", server.port), SOON_S) as sock:
            sock.sendall(with_length(JoiningSide(TOKEN).opening) + bytes(5000))
    client = connect(server)
    assert client.join(hello(), TOKEN) == WELCOME
    events.next("admitted")


def key_updates(number: int, stranger: ssl.SSLObject, sent: ssl.MemoryBIO) -> bytes:
    """Messages that are TLS's own: they may come at any time, and Python's ssl makes none."""
    library = ctypes.PyDLL(_ssl.__file__)
    if not hasattr(library, "SSL_key_update"):
        pytest.skip("this Python hides its OpenSSL")
    # In C, a PyObject_HEAD of two words, a pointer, and this one.
    inner = id(stranger._sslobj)  # type: ignore[attr-defined]
    own = ctypes.c_void_p.from_address(inner + 3 * ctypes.sizeof(ctypes.c_void_p))
    for _ in range(number):
        assert library.SSL_key_update(own, 0) == 1
        assert library.SSL_do_handshake(own) == 1
    return sent.read()


def test_a_stranger_that_sends_only_messages_of_tls_itself_is_refused_soon(
    server: JoinServer, events: Recorder, connect: Connect
) -> None:
    """Each takes 13 us to read: the thread that serves all must not go on while there are more."""
    client = connect(server)
    client.join(hello(), TOKEN)
    events.next("admitted")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    received, sent = ssl.MemoryBIO(), ssl.MemoryBIO()
    stranger = context.wrap_bio(received, sent)
    with socket.create_connection(("127.0.0.1", server.port), SOON_S) as sock:
        sock.sendall(encode(Opening()))
        assert decode(read(sock)) == StartTls()
        while True:
            with contextlib.suppress(ssl.SSLWantReadError):
                stranger.do_handshake()
                break
            sock.sendall(sent.read())
            received.write(sock.recv(65536))
        sock.sendall(sent.read())
        with contextlib.suppress(OSError):  # once it is closed
            sock.sendall(key_updates(5_000, stranger, sent))
        assert "doesn't have this run's token" in events.next("refused")
    client.send(Kill(1, 2))
    assert events.next("received") == Kill(1, 2)


class _Packets:
    """Receives packets, and notes that one came."""

    def __init__(self) -> None:
        self.came = threading.Event()

    def allocate(self, num_bytes: int) -> bytearray:
        return bytearray(num_bytes)

    def received(self, packet: Packet) -> None:
        self.came.set()

    def ended(self) -> None:
        pass


def test_a_large_packet_gets_one_turn_at_a_time(
    server: JoinServer, events: Recorder, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its connection would get more turns in each round, and others would wait for longer."""
    client, packets = connect(server), _Packets()
    client.join(hello(), TOKEN)
    events.next("admitted").carry(packets)
    turns, read = [0], server._read

    def counted(connection: Any) -> None:
        read(connection)
        turns.append(len(server._unread))

    monkeypatch.setattr(server, "_read", counted)
    run_aside(client.receive)  # sends what the server does not take at once
    client.send_packet(Packet(1, [bytes(200_000_000)]))
    assert packets.came.wait(SOON_S)
    assert max(turns) <= 1


class Between:
    """Passes bytes on between a process and the trainer, and damages one of them."""

    def __init__(self, port: int, at: int) -> None:
        """Damage the ``at``-th byte that the process sends."""
        self._port, self._at = port, at
        self._sock = socket.create_server(("127.0.0.1", 0))
        self.port = self._sock.getsockname()[1]
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with self._sock, contextlib.suppress(OSError):
            near, _ = self._sock.accept()
            with near, socket.create_connection(("127.0.0.1", self._port)) as far:
                back = threading.Thread(target=self._pass_on, args=(far, near), daemon=True)
                back.start()
                self._pass_on(near, far, self._at)
                far.shutdown(socket.SHUT_RDWR)
                back.join(SOON_S)

    @staticmethod
    def _pass_on(source: socket.socket, target: socket.socket, left: int = -1) -> None:
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(65536)):
                if 0 <= left < len(data):
                    data[left] ^= 1
                left -= len(data)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


def test_a_byte_that_is_changed_on_the_way_ends_the_connection(
    server: JoinServer, events: Recorder, connect: Connect
) -> None:
    proxy = Between(server.port, at=10_000)
    client = connect(port=proxy.port)
    client.join(hello(), TOKEN)
    connection = events.next("admitted")
    numbers = range(1000)
    for number in numbers:
        client.send(Kill(number, 0))
    received = []
    while (event := events.queue.get(timeout=SOON_S))[0] == "received":
        received.append(event[1])
    assert event == ("closed", connection)
    assert received == [Kill(number, 0) for number in numbers][: len(received)]
    assert len(received) < len(numbers)
    assert client.receive() is None


def test_a_wrong_setting_and_no_certificate_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgumentError, match="security='ssl': must be 'tls' or 'token'"):
        trainer_tls("10.0.0.5", "ssl")
    monkeypatch.setenv("DISTCOLLECT_SECURITY", "none")
    with pytest.raises(ArgumentError, match="DISTCOLLECT_SECURITY='none': must be"):
        trainer_tls("10.0.0.5")
    monkeypatch.delenv("DISTCOLLECT_SECURITY")
    monkeypatch.setenv("DISTCOLLECT_TLS_CERT", "/nowhere")
    with pytest.raises(LaunchError, match=r"no TLS: .*/nowhere.*DISTCOLLECT_SECURITY=token"):
        trainer_tls("10.0.0.5")
    assert trainer_tls("127.0.0.1") is None


def test_without_tls_between_hosts_a_warning_says_so(caplog: pytest.LogCaptureFixture) -> None:
    assert trainer_tls("127.0.0.1", "token") is None
    assert not caplog.text
    assert trainer_tls("10.0.0.5", "token") is None
    assert "not encrypted" in caplog.text


def test_the_messages_before_tls_stay_as_they_are() -> None:
    assert to_bytes(StartTls()) == b'{"message": "StartTls"}'
