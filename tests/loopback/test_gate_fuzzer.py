"""Strangers send anything in any order, while workers join and exchange messages.

The default profile makes the same 60 cases in each run. 5,000, and others each time:

    python -m pytest tests/loopback/test_gate_fuzzer.py --hypothesis-profile=long --timeout 0
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from helpers.join_server import TOKEN, WELCOME, Recorder, hello, server_threads
from helpers.waiting import eventually
from hypothesis import given, settings
from hypothesis import strategies as st

from distcollect.errors import LaunchError
from distcollect.net.client import ControlConnection
from distcollect.net.framing import with_length
from distcollect.net.handshake import JoiningSide, Opening, Proof
from distcollect.net.messages import Kill, encode, to_bytes
from distcollect.net.server import JoinServer

WAIT_S = 60
_NUMBERS = itertools.count(1)


@dataclass
class Stranger:
    """A connection whose other end has no token, except by what it has recorded."""

    sock: socket.socket
    side: JoiningSide = field(default_factory=lambda: JoiningSide("not the token"))

    def send(self, data: bytes) -> None:
        with contextlib.suppress(OSError):
            self.sock.sendall(data)

    def receive(self) -> bytes:
        """A whole answer, or what there is of one."""
        with contextlib.suppress(OSError):  # closed, or silent
            self.sock.settimeout(0.02)
            return self.sock.recv(65536)
        return b""


@dataclass
class Gate:
    """A join server, one worker that is there all the time, and a handshake that was recorded."""

    events: Recorder
    server: JoinServer
    worker: ControlConnection
    recorded: list[bytes]

    def dial(self) -> Stranger:
        return Stranger(socket.create_connection(("127.0.0.1", self.server.port), WAIT_S))

    def join(self) -> ControlConnection:
        client = ControlConnection("127.0.0.1", self.server.port, WAIT_S)
        try:
            assert client.join(hello(worker_id=1), TOKEN) == WELCOME
        except BaseException:
            client.close()
            raise
        return client

    def check(self) -> None:
        """Nobody else has joined, the worker's messages come, and another worker can join."""
        number = next(_NUMBERS)
        self.worker.send(Kill(number, 0))
        another = self.join()
        another.send(Kill(number, 1))
        another.close()
        got = [self.next() for _ in range(4)]
        assert sorted(kind for kind, _ in got) == ["admitted", "closed", "received", "received"]
        messages = [what for kind, what in got if kind == "received"]
        assert sorted(m.incarnation for m in messages) == [0, 1]
        assert all(m.worker_id == number for m in messages)

    def next(self) -> tuple[str, object]:
        while (got := self.events.queue.get(timeout=WAIT_S))[0] == "refused":
            pass
        return got


@pytest.fixture(scope="module")
def gate() -> Iterator[Gate]:
    events = Recorder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("distcollect.net.server._STRANGERS_PER_S", 1e6)
        server = JoinServer("127.0.0.1", TOKEN, events)
    worker = ControlConnection("127.0.0.1", server.port, WAIT_S)
    worker.join(hello(), TOKEN)
    events.next("admitted")
    side = JoiningSide(TOKEN)  # as somebody who listens on the network has recorded it
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.sendall(with_length(side.opening))
        challenge = sock.recv(65536)[4:]
        recorded = [side.opening, side.prove(challenge), encode(hello())[4:]]
    yield Gate(events, server, worker, recorded)
    worker.close()
    server.close()
    assert not server_threads()


OPENING = to_bytes(Opening())
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=10,
)
FRAMES = st.one_of(
    st.binary(max_size=200),
    st.just(b"{}"),
    st.just(OPENING),
    st.integers(0, len(OPENING)).map(lambda n: OPENING[:n]),
    st.builds(lambda mac: to_bytes(Proof(mac)), st.text(max_size=70)),
    JSON.map(lambda value: repr(value).replace("'", '"').encode()),
    st.sampled_from(
        [
            b'"\xff\xfe"',
            b'{"token": "\\ud800"}',
            b'{"message":"Proof","mac":"\\ud800"}',
            b"GET / HTTP/1.1\r\n",
        ]
    ),
    st.sampled_from([b"[" * 4000, b'{"message":"Opening","versions":{},"nonce":""}', b"9" * 4000]),
)


def replay(gate: Gate, stranger: Stranger, _: bytes, first: int) -> None:
    for frame in gate.recorded[first % 3 :]:
        stranger.send(with_length(frame))


def send_pieces(gate: Gate, stranger: Stranger, frame: bytes, _: int) -> None:
    for byte in with_length(frame)[:40]:
        stranger.send(bytes([byte]))


def send_proof(gate: Gate, stranger: Stranger, *_: object) -> None:
    with contextlib.suppress(LaunchError):  # what it got is no challenge
        stranger.send(with_length(stranger.side.prove(stranger.receive()[4:])))


def reset(gate: Gate, stranger: Stranger, *_: object) -> None:
    with contextlib.suppress(OSError):
        linger = struct.pack("ii", 1, 0)
        stranger.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    stranger.sock.close()


def end(gate: Gate, stranger: Stranger, *_: object) -> None:
    with contextlib.suppress(OSError):
        stranger.sock.shutdown(socket.SHUT_WR)


Act = Callable[[Gate, Stranger, bytes, int], object]
DO: list[Act] = [
    lambda gate, stranger, frame, number: stranger.send(with_length(frame)),
    lambda gate, stranger, frame, number: stranger.send(frame),
    lambda gate, stranger, frame, number: stranger.send(with_length(frame)[: len(frame) // 2 + 3]),
    lambda gate, stranger, frame, number: stranger.send(with_length(frame)[:200] * 300),
    lambda gate, stranger, frame, number: stranger.send(struct.pack("!I", number)),
    lambda gate, stranger, frame, number: stranger.send(with_length(stranger.side.opening)),
    lambda gate, stranger, frame, number: None,
    send_pieces,
    send_proof,
    replay,
    reset,
    end,
]
ACTS = st.tuples(
    st.integers(0, 2), st.sampled_from(DO), FRAMES, st.integers(0, 5) | st.integers(0, 2**32 - 1)
)


@settings(max_examples=5 * settings.default.max_examples)
@given(st.lists(ACTS, max_size=12))
def test_whatever_strangers_send_workers_join(
    gate: Gate, acts: list[tuple[int, Act, bytes, int]]
) -> None:
    """Up to three strangers at a time, in any order."""
    strangers = [gate.dial() for _ in range(1 + max((act[0] for act in acts), default=0))]
    try:
        for who, act, frame, number in acts:
            act(gate, strangers[who], frame, number)
        gate.check()
    finally:
        for stranger in strangers:
            stranger.sock.close()


def test_what_a_stranger_leaves_is_bounded(gate: Gate) -> None:
    """After all cases, the server keeps the worker alone."""
    eventually(lambda: not gate.server.num_strangers)
