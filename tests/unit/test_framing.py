"""Frames that come in pieces, and what is kept for a peer that does not read."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distcollect.net.framing import FrameReader, Outbox, with_length


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
