"""What a trainer keeps of the tokens of its peers."""

from __future__ import annotations

import pytest

from distcollect.net.client import ControlConnection
from distcollect.net.framing import Message
from distcollect.net.server import Connection, JoinServer, JoinServerEvents

SECRET = "e9d1a2-nobody-may-see-this"


@pytest.mark.parametrize("versions", ["right", "wrong"])
def test_a_peers_token_is_not_kept(versions: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a peer said of itself is logged, and shown in errors."""
    told: list[Message] = []

    class Events(JoinServerEvents):
        def admit(self, connection: Connection) -> Message:
            told.append(connection.hello)
            return {}

        def refused(self, hello: Message, reason: str) -> None:
            told.append(hello)

    gate = JoinServer("127.0.0.1", SECRET, Events())
    try:
        lifeline = ControlConnection("127.0.0.1", gate.port, 10)
        if versions == "wrong":
            monkeypatch.setattr("distcollect.net.framing.versions", lambda: {"torch": "0.4"})
        if versions == "right":
            lifeline.join("worker", SECRET)
        else:
            lifeline.send({"role": "worker", "token": SECRET, "versions": {}, "host": "here"})
            assert lifeline.receive() is not None
        lifeline.close()
    finally:
        gate.close()
    assert [hello["role"] for hello in told] == ["worker"]
    assert SECRET not in str(told)
