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
        for send in (lambda: outbox.send(bytes(50_000)), outbox.flush):
            with pytest.raises(OSError, match="has ended"):
                send()
        assert outbox.num_unsent == 0
