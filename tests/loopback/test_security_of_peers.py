"""What strangers learn of the token when they listen or connect."""

from __future__ import annotations

import selectors
import socket
import threading

import pytest
from helpers.join_server import SOON_S, Recorder, events, hello

import distcollect as dc
from distcollect.net.client import ControlConnection
from distcollect.net.messages import WorkerWelcome
from distcollect.net.server import JoinServer

SECRET = "e9d1a2-nobody-may-see-this"
__all__ = ["events"]


class Wire:
    """Passes one connection on to a server, and keeps all that passes, both ways."""

    def __init__(self, port: int) -> None:
        self.seen = bytearray()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._run, args=(port,), daemon=True)
        self._thread.start()

    def _run(self, port: int) -> None:
        near, _ = self._listener.accept()
        far = socket.create_connection(("127.0.0.1", port))
        with near, far, selectors.DefaultSelector() as both:
            both.register(near, selectors.EVENT_READ, far)
            both.register(far, selectors.EVENT_READ, near)
            while True:
                for key, _ in both.select():
                    data = key.fileobj.recv(65536)
                    if not data:
                        return
                    self.seen += data
                    key.data.sendall(data)

    def close(self) -> None:
        self._thread.join(SOON_S)
        self._listener.close()


@pytest.mark.parametrize("token", [SECRET, SECRET + "x"], ids=["right", "wrong"])
def test_the_token_is_never_sent(token: str, events: Recorder) -> None:
    server = JoinServer("127.0.0.1", SECRET, events)
    wire = Wire(server.port)
    client = ControlConnection("127.0.0.1", wire.port, SOON_S)
    try:
        if token == SECRET:
            assert isinstance(client.join(hello(), token), WorkerWelcome)
        else:
            with pytest.raises(dc.LaunchError, match="token"):
                client.join(hello(), token)
    finally:
        client.close()
        wire.close()
        server.close()
    assert b"nonce" in wire.seen
    assert SECRET.encode() not in wire.seen
