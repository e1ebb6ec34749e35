"""Control connections between processes: each side notices the other's end."""

from __future__ import annotations

import os
import signal

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
    start,
)
from helpers.marked import Marked

from distcollect.net.server import JoinServer

__all__ = ["connect", "events", "server"]


@pytest.mark.parametrize("fork", ["", "fork"])
def test_the_server_sees_a_process_end(
    server: JoinServer, events: Recorder, marked: Marked, fork: str
) -> None:
    process = start(marked, "join", "127.0.0.1", server.port, TOKEN, fork)
    assert process.stdout is not None
    connection = events.queue.get(timeout=120)[1]
    assert process.stdout.readline() == "ready\n"
    process.kill()
    assert events.next("closed") is connection
    process.wait(SOON_S)
    assert len(marked.pids()) == bool(fork)
    process.stdout.close()


@pytest.mark.parametrize("how", ["kill", "close"])
@pytest.mark.parametrize("fork", ["", "fork"])
def test_a_client_sees_the_server_end(
    marked: Marked, connect: Connect, how: str, fork: str
) -> None:
    """Whether its process ends or it is closed; what the process has forked changes nothing."""
    process = start(marked, "serve", TOKEN, fork)
    assert process.stdout is not None
    client = connect(port=int(process.stdout.readline()))
    client.join(hello(), TOKEN)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGKILL if how == "kill" else signal.SIGTERM)
    client.sock.settimeout(3)
    try:
        assert client.receive() is None
    finally:
        process.kill()
        process.wait(SOON_S)
        process.stdout.close()
    assert len(marked.pids()) == bool(fork)


def test_a_forked_child_has_no_end_of_a_connection_for_a_process_to_come(
    server: JoinServer,
) -> None:
    """It would hide that process's end from the trainer."""
    with server.connect() as theirs:
        if (child := os.fork()) == 0:
            os._exit(theirs.fileno() != -1)
        assert os.waitpid(child, 0)[1] == 0
