"""Joins a gate, or serves one, and waits; see test_control_connections.py."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

from distcollect.net.client import ControlConnection
from distcollect.net.framing import Message
from distcollect.net.server import Connection, JoinServer, JoinServerEvents


def fork_a_child() -> None:
    if os.fork() == 0:
        os.close(1)
        time.sleep(1000)


class Events(JoinServerEvents):
    joined = threading.Event()

    def admit(self, connection: Connection) -> Message:
        self.joined.set()
        return {}


role, *args, fork = sys.argv[1:]
if role == "join":
    host, port, token = args
    lifeline = ControlConnection(host, int(port), 10)
    lifeline.join("worker", token)
else:
    closing = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: closing.set())
    gate = JoinServer("127.0.0.1", args[0], Events())
    print(gate.port, flush=True)
    Events.joined.wait()
if fork:
    fork_a_child()
print("ready", flush=True)
if role == "gate":
    closing.wait()
    gate.close()
time.sleep(1000)
