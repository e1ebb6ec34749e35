"""Frames that come in pieces, and what is kept for a peer that does not read."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distcollect.errors import LaunchError
from distcollect.net.framing import FrameReader, Outbox, Packet, with_length


@pytest.mark.parametrize("end", [Outbox.end, Outbox.close])
def test_nothing_is_kept_once_the_connection_has_ended(end: Callable[[Outbox], None]) -> None:
    """Others may send until they hear of its end."""
    here, there = socket.socketpair()
    with here, there:
        here.setblocking(False)
        outbox = Outbox(here, max_unsent=100_000)

        def overfill() -> None:
            for _ in range(1000):
                outbox.send(bytes(50_000))

        with pytest.raises(OSError, match="did not take"):
            overfill()
        end(outbox)
        assert outbox.num_unsent == 0
        for data in (bytes(50_000), b""):
            with pytest.raises(OSError, match="has ended"):
                outbox.send(data)
        assert outbox.num_unsent == 0


@settings(max_examples=10 * settings.default.max_examples)
@given(st.lists(st.binary(max_size=50), max_size=20), st.lists(st.integers(1, 30)))
def test_frames_come_whole_however_they_are_cut(frames: list[bytes], cuts: list[int]) -> None:
    data = b"".join(with_length(frame) for frame in frames)
    reader, found = FrameReader(), []
    for size in [*cuts, len(data)]:
        piece, data = data[:size], data[size:]
        reader.feed(piece)
        while (frame := reader.next()) is not None:
            found.append(frame)
    assert found == frames


@contextlib.contextmanager
def both_ends(max_unsent: int) -> Iterator[tuple[Outbox, FrameReader, socket.socket]]:
    """What sends, what reads packets, and the socket that it reads from; nothing blocks."""
    here, there = socket.socketpair()
    with here, there:
        for sock in (here, there):
            sock.setblocking(False)
        reader = FrameReader()
        reader.allocate = bytearray
        yield Outbox(here, max_unsent=max_unsent), reader, there


@settings(max_examples=10 * settings.default.max_examples)
@given(
    st.lists(
        st.binary(max_size=50)
        | st.lists(st.sampled_from([0, 1, 70_000, 600_000]), min_size=1, max_size=3),
        max_size=8,
    ),
    st.booleans(),
)
def test_messages_pass_packets_and_each_comes_whole(
    sent: list[bytes | list[int]], reads_meanwhile: bool
) -> None:
    with both_ends(max_unsent=1_000_000) as (outbox, reader, there):
        messages, packets = [], []

        def read() -> None:
            with contextlib.suppress(BlockingIOError):
                while reader.receive(there):
                    while (frame := reader.next()) is not None:
                        if isinstance(frame, bytes):
                            messages.append(frame)
                        else:
                            packets.append((frame.number, [bytes(part) for part in frame.parts]))

        expected = []
        for number, item in enumerate(sent):
            if isinstance(item, bytes):
                outbox.send(with_length(item))
            else:
                expected.append((number, [bytes([number]) * size for size in item]))
                outbox.send_packet(Packet(*expected[-1]))
            if reads_meanwhile:
                read()
        while outbox.send():
            read()
        read()
        assert outbox.num_unsent == 0
    assert messages == [item for item in sent if isinstance(item, bytes)]
    assert sorted(packets) == expected  # a small one may pass a large one


def test_a_message_waits_for_no_large_packet() -> None:
    with both_ends(max_unsent=100_000) as (outbox, reader, there):
        assert outbox.send_packet(Packet(7, [bytes(20_000_000)]))
        assert outbox.send(with_length(b"urgent"))
        arrived: list[object] = []
        while len(arrived) < 2:
            outbox.send()
            with contextlib.suppress(BlockingIOError):
                reader.receive(there)
            arrived += iter(reader.next, None)
    assert arrived == [b"urgent", Packet(7, [bytearray(20_000_000)])]


def test_a_packet_that_was_not_asked_for_is_refused() -> None:
    reader = FrameReader()
    reader.feed(b"\x01\0\0\x08" + bytes(8))
    with pytest.raises(LaunchError, match="not part of distcollect"):
        reader.next()
    reader.allocate = bytearray
    assert reader.next() == Packet(0, [b""])
    reader.feed(b"\x03\0\0\x08")
    with pytest.raises(LaunchError, match="belongs to no packet"):
        reader.next()
