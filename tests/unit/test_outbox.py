"""What is kept for a peer that does not read."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest

from distcollect.net.outbox import Outbox


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
        for chunks in ((bytes(50_000),), ()):
            with pytest.raises(OSError, match="has ended"):
                outbox.send(*chunks)
        assert outbox.num_unsent == 0


def test_chunks_come_in_their_order_however_slowly_the_peer_takes_them() -> None:
    here, there = socket.socketpair()
    with here, there:
        here.setblocking(False)
        outbox = Outbox(here, max_unsent=1 << 30)
        chunks = [memoryview(bytes([n % 251]) * (n * 997 % 5000)) for n in range(500)]
        sent, received = b"".join(chunks), bytearray()
        for first in range(0, len(chunks), 7):
            outbox.send(*chunks[first : first + 7])
        while outbox.num_unsent:
            received += there.recv(3000)
            outbox.send()
        outbox.end_sending()
        while data := there.recv(1 << 16):
            received += data
        assert received == sent
