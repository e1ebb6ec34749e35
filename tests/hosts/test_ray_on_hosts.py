"""A Ray cluster of three hosts, of which one is lost while workers collect."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.hosts import Hosts
from helpers.launching import finish, start
from helpers.marked import Marked
from helpers.ray_cluster import OPTIONS, RAY, SCRIPT, environment, needs_ray
from helpers.waiting import eventually

pytestmark = [
    needs_ray,
    pytest.mark.skipif(
        os.geteuid() != 0 or not shutil.which("ip"),
        reason="makes network namespaces: needs root and iproute2",
    ),
    pytest.mark.timeout(400),
    pytest.mark.slow,  # tests/processes/test_ray.py is its short version
]
# By default Ray takes a node for dead after about 25 s.
_SOONER = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "3",
}


class Cluster:
    """Ray on hosts."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self._hosts = hosts
        self._folder = folder
        self._net = hosts.address.rpartition(".")[0]
        self.address = f"{self._net}.1:6390"

    def on(self, host: int, *command: object) -> Any:
        return start(
            [*self._hosts.on(host), *command],
            **environment(RAY_ADDRESS=self.address, **self._hosts.env, **_SOONER),
        )

    def start(self, *others: int, head: bool = False) -> None:
        """Start Ray on the first host, or on others."""
        role = ["--head", "--port=6390", f"--temp-dir={self._folder}", "--include-dashboard=false"]
        hosts = [1] if head else others
        finish(
            self.on(
                host,
                *(RAY, "start", "--num-cpus=1", f"--node-ip-address={self._net}.{host}"),
                *(role if head else [f"--address={self.address}"]),
                *(option for option in OPTIONS if "dashboard" not in option),
            )
            for host in hosts
        )

    def stop(self) -> None:
        finish([self.on(host, RAY, "stop", "--grace-period=5") for host in (1, 2, 3)])


@pytest.fixture
def cluster(three_hosts: Hosts, marked: Marked) -> Iterator[Cluster]:
    # A short path: it becomes part of the names of sockets.
    with tempfile.TemporaryDirectory(prefix="dcray", dir="/tmp", ignore_cleanup_errors=True) as it:
        cluster = Cluster(three_hosts, Path(it))
        cluster.start(head=True)
        cluster.start(2, 3)
        yield cluster


def lines(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith('{"step"'):
            yield json.loads(line)


def test_a_node_is_lost_and_another_one_added(
    cluster: Cluster, three_hosts: Hosts, marked: Marked
) -> None:
    driver = cluster.on(1, sys.executable, SCRIPT, "hosts")
    seen = lines(driver)
    assert len(set(next(seen)["hosts"])) == 3
    three_hosts.do(3, "crash")
    began = time.monotonic()
    fewer = next(seen)
    assert time.monotonic() - began < 12
    assert len(fewer["workers"]) == 2
    assert fewer["frames"] == 96
    three_hosts.do(3, "boot")
    cluster.start(3)
    assert next(seen)["workers"] == [0, 1, 2]
    assert next(seen) == {"step": "done", "open": 0}
    driver.wait(60)
    cluster.stop()
    eventually(lambda: not of_the_run(marked), about=marked.left)


def of_the_run(marked: Marked) -> list[str]:
    """What is left, but for the process that is the host which was started again."""
    return [left for left in marked.left() if "python" in left or "ray" in left]
