"""What a trainer keeps of the tokens of its peers."""

from __future__ import annotations

import pytest

from distcollect.net.client import ControlConnection
from distcollect.net.messages import Hello, Message, Refused, WorkerHello
from distcollect.net.server import Connection, JoinServer, JoinServerEvents

SECRET = "e9d1a2-nobody-may-see-this"


@pytest.mark.parametrize("versions", ["right", "wrong"])
def test_a_peers_token_is_not_kept(versions: str) -> None:
    """What a peer said of itself is logged, and shown in errors."""
    told: list[Hello | None] = []

    class Events(JoinServerEvents):
        def admit(self, connection: Connection) -> Message:
            told.append(connection.hello)
            return Refused("there is no free slot for it")

        def refused(self, hello: Hello | None, reason: str) -> None:
            told.append(hello)

    server = JoinServer("127.0.0.1", SECRET, Events())
    try:
        client = ControlConnection("127.0.0.1", server.port, 10)
        about = {} if versions == "right" else {"versions": {"torch": "0.4"}}
        client.send(WorkerHello(token=SECRET, worker_id=0, incarnation=0, **about))
        assert isinstance(client.receive(), Refused)
        client.close()
    finally:
        server.close()
    assert [type(hello) for hello in told] == [WorkerHello]
    assert SECRET not in str(told)
