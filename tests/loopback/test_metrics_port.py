"""The port for metrics."""

from __future__ import annotations

import socket
import sys
import threading
import urllib.request

import pytest
from helpers.bad_launches import free_port
from helpers.waiting import eventually

import distcollect as dc


def test_a_collector_that_could_not_be_made_gives_its_port_back() -> None:
    options = dc.Monitor(prometheus_port=free_port(), view=False)
    with pytest.raises(dc.ArgumentError, match="envs_per_worker") as held:
        dc.SyncDataCollector("CartPole-v1", frames_per_batch=4, envs_per_worker=0, monitor=options)
    # The traceback of the error keeps the collector alive.
    with dc.SyncDataCollector("CartPole-v1", frames_per_batch=4, monitor=options) as collector:
        with pytest.raises(dc.ArgumentError, match=r"in use\): name another port, or 0"):
            dc.SyncDataCollector("CartPole-v1", frames_per_batch=4, monitor=options)
        url = f"http://127.0.0.1:{options.prometheus_port}/metrics"
        assert urllib.request.urlopen(url, timeout=20).read() == b""
        collector.next()
        assert b"distcollect_frames_total 4.0" in urllib.request.urlopen(url, timeout=20).read()
    assert held.value.__traceback__ is not None


def test_who_sends_no_request_keeps_no_thread() -> None:
    options = dc.Monitor(prometheus_port=free_port(), view=False)
    with dc.SyncDataCollector("CartPole-v1", frames_per_batch=4, monitor=options) as collector:
        num_threads = threading.active_count()
        address = "127.0.0.1", options.prometheus_port
        with socket.create_connection(address, 20), socket.create_connection(address, 20) as half:
            half.sendall(b"GET /metrics HTTP/1.1\r\n")
            eventually(lambda: threading.active_count() >= num_threads + 2)
            eventually(lambda: threading.active_count() <= num_threads)
        collector.next()
        url = f"http://127.0.0.1:{options.prometheus_port}/metrics"
        assert b"distcollect_frames_total 4.0" in urllib.request.urlopen(url, timeout=20).read()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    options = dc.Monitor(prometheus_port=0, view=False)
    with pytest.raises(dc.ArgumentError, match=r"pip install 'distcollect\[prometheus\]'"):
        dc.SyncDataCollector("CartPole-v1", frames_per_batch=4, monitor=options)
