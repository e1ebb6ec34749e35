"""The port for metrics."""

from __future__ import annotations

import socket
import struct
import threading

import pytest

import distcollect as dc
from distcollect.results import Stats, WorkerStats
from distcollect.telemetry.prometheus import Prometheus


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def test_a_collector_that_could_not_be_made_gives_its_port_back() -> None:
    options = dc.Monitor(prometheus_port=free_port(), view=False)
    with pytest.raises(dc.ArgumentError, match="envs_per_worker") as held:
        dc.SyncDataCollector("CartPole-v1", frames_per_batch=4, envs_per_worker=0, monitor=options)
    # Somebody looks at the error, and with that at its collector.
    with (
        dc.SyncDataCollector("CartPole-v1", frames_per_batch=4, monitor=options),
        pytest.raises(dc.ArgumentError, match=r"in use\); name another port, or 0"),
    ):
        dc.SyncDataCollector("CartPole-v1", frames_per_batch=4, monitor=options)
    assert held.value.__traceback__ is not None


def test_who_asks_for_metrics_and_goes_away_is_no_news(capfd: pytest.CaptureFixture[str]) -> None:
    many = Stats(workers=dict.fromkeys(range(20_000), WorkerStats()))
    asked = threading.Event()

    def latest() -> Stats:
        asked.set()
        return many

    server = Prometheus(0, latest)
    try:
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
            client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            assert asked.wait(10)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        for thread in threading.enumerate():
            if "process_request_thread" in thread.name:
                thread.join(20)
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
            client.sendall(b"GET /elsewhere HTTP/1.1\r\n\r\n")
            assert b" 404 " in client.recv(100)
    finally:
        server.close()
    assert capfd.readouterr().err == ""
