"""Collecting by TCP with TLS, over a network that stands still, is slow, or loses packets."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
from helpers.hosts import Hosts
from helpers.launching import finish, slurm_variables, start
from helpers.paths import SCRIPTS

SCRIPT = SCRIPTS / "collect_counted.py"
SLOW = ("slow", "--delay-ms", "50", "--loss", "1")

pytestmark = [
    pytest.mark.usefixtures("marked"),
    pytest.mark.skipif(
        os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("ss"),
        reason="makes network namespaces: needs root and iproute2",
    ),
]


# It disturbs the hosts by a function meanwhile.
Collected: TypeAlias = Callable[[Callable[[], None]], dict[str, Any]]


@pytest.fixture
def collected(three_hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> Collected:
    """Collects on three hosts, disturbs them meanwhile, and returns what the trainer says."""
    monkeypatch.setenv("DISTCOLLECT_TRANSPORT", "tcp")
    for variable in three_hosts.env.items():
        monkeypatch.setenv(*variable)

    def collect(disturb: Callable[[], None]) -> dict[str, Any]:
        ranks = [
            start(
                [*three_hosts.on(1 + rank), sys.executable, SCRIPT], **slurm_variables(rank, 3, 1)
            )
            for rank in range(3)
        ]
        while (line := ranks[0].stdout.readline()) != "running\n":
            assert line, "the trainer has ended"
        disturb()
        ranks[0].stdin.write("\n")
        ranks[0].stdin.flush()
        [output, *_] = finish(ranks)
        seen: dict[str, Any] = json.loads(output.splitlines()[-1])
        assert seen["open"] == 0, output
        assert seen["delivered"] == seen["came"]
        return seen

    return collect


def wait(seconds: float) -> None:
    """How long the network is in trouble is what is tested."""
    threading.Event().wait(seconds)


@pytest.mark.parametrize("num_pauses", [1, pytest.param(6, marks=pytest.mark.slow)])
def test_a_network_that_stands_still_for_5_s(
    three_hosts: Hosts, collected: Collected, num_pauses: int
) -> None:
    def pause() -> None:
        for _ in range(num_pauses):
            three_hosts.do(3, "unplug")
            wait(5)
            three_hosts.do(3, "plug")
            wait(5)

    seen = collected(pause)
    assert seen["lost"].keys() <= {"shut_down"}, seen
    assert (seen["at_most"], seen["replaced"]) == (0, 0)


@pytest.mark.parametrize("seconds", [5, pytest.param(120, marks=pytest.mark.slow)])
def test_a_slow_link_that_loses_packets(
    three_hosts: Hosts, collected: Collected, seconds: float
) -> None:
    def slow() -> None:
        three_hosts.do(3, *SLOW)
        try:
            wait(seconds)
        finally:
            three_hosts.do(3, "slow", "off")

    seen = collected(slow)
    assert seen["lost"].keys() <= {"shut_down"}, seen
    assert (seen["at_most"], seen["replaced"]) == (0, 0)


def test_connections_that_a_slow_link_breaks(three_hosts: Hosts, collected: Collected) -> None:
    """Their worker is replaced; what it owed is lost, and said to be; nothing comes twice."""

    def cut() -> None:
        three_hosts.do(3, *SLOW)
        try:
            wait(2)
            # As a firewall does that forgets what passes through it: both ends get a reset.
            reset = ["ss", "-K", "-tn", "state", "established"]
            subprocess.run([*three_hosts.on(3), *reset], check=True, timeout=20)
            wait(6)
        finally:
            three_hosts.do(3, "slow", "off")

    seen = collected(cut)
    assert seen["lost"].keys() <= {"shut_down", "worker_lost"}, seen
    assert seen["replaced"] >= 1
