"""Joins a join server, or runs one, and waits; see test_control_connections.py."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

from distcollect.net.client import ControlConnection
from distcollect.net.messages import Message, WorkerHello, WorkerWelcome
from distcollect.net.server import Connection, JoinServer, JoinServerEvents


def fork_a_child() -> None:
    if os.fork() == 0:
        os.close(1)
        time.sleep(1000)


class Events(JoinServerEvents):
    joined = threading.Event()

    def admit(self, connection: Connection) -> Message:
        self.joined.set()
        return WorkerWelcome(peer=1, trainer_memory=None)


role, *args, fork = sys.argv[1:]
if role == "join":
    host, port, token = args
    client = ControlConnection(host, int(port), 10)
    client.join(WorkerHello(worker_id=0, incarnation=0), token)
else:
    closing = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: closing.set())
    server = JoinServer("127.0.0.1", args[0], Events())
    print(server.port, flush=True)
    Events.joined.wait()
if fork:
    fork_a_child()
print("ready", flush=True)
if role == "serve":
    closing.wait()
    server.close()
time.sleep(1000)
