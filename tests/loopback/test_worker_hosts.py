"""Which processes the trainer takes to be there, as supervisors come and go."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from distcollect.errors import LaunchError
from distcollect.launch.worker_hosts import Cluster, listen_address


class Connection:
    """A supervisor's, as the gate hands it over."""

    def __init__(self, **hello: Any) -> None:
        self.hello = {"role": "supervisor", **hello}
        self.sent: list[dict[str, Any]] = []

    def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster("127.0.0.1", "a token")
    yield cluster
    cluster.gate.close()


def welcome(cluster: Cluster, connection: Connection) -> None:
    cluster.admit(connection)  # type: ignore[arg-type]
    cluster.admitted(connection)  # type: ignore[arg-type]


@pytest.mark.parametrize("seen_first", ["the end", "the return"])
def test_processes_end_with_their_supervisors_connection(cluster: Cluster, seen_first: str) -> None:
    """At the end nobody is waited for who was lost with a connection before."""
    first, again = Connection(rank=1), Connection(rank=1)
    welcome(cluster, first)
    cluster.spawn(0, 0, {}, {})
    if seen_first == "the end":
        cluster.closed(first)  # type: ignore[arg-type]
    welcome(cluster, again)
    if seen_first == "the return":
        cluster.closed(first)  # type: ignore[arg-type]
    cluster.spawn(0, 1, {}, {})
    cluster.received(again, {"incarnation": 1, "exited": {"code": 0, "stepped": 0}})  # type: ignore[arg-type]
    begin = time.monotonic()
    cluster.end_processes(5)
    assert time.monotonic() - begin < 1
    assert not any("kill" in message for message in again.sent)


def test_nothing_is_sent_to_a_supervisor_before_its_welcome(cluster: Cluster) -> None:
    connection = Connection(rank=1)
    cluster.admit(connection)  # type: ignore[arg-type]
    with pytest.raises(LaunchError, match="worker 0"):
        cluster.spawn(0, 0, {}, {})
    cluster.admitted(connection)  # type: ignore[arg-type]
    cluster.spawn(0, 0, {}, {})
    assert [message["spawn"] for message in connection.sent] == [0]


def test_where_to_listen_by_argument_or_by_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert listen_address() == ("127.0.0.1", 0)
    monkeypatch.setenv("DISTCOLLECT_LISTEN", "10.0.0.5:29600")
    assert listen_address() == ("10.0.0.5", 29600)
    assert listen_address("10.0.0.6:29601") == ("10.0.0.6", 29601)
