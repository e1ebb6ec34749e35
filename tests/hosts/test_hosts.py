"""Training by torchrun over several hosts whose networks fail.

They are network namespaces on this machine. Each has two IPv4 networks and one IPv6 network, and
as on Debian its own name stands for 127.0.1.1; the others know it by its address on the second.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.hosts import Hosts
from helpers.launching import slurm_variables
from helpers.marked import Marked
from helpers.paths import SCRIPTS
from helpers.trace_checks import (
    assert_answered,
    assert_in_order,
    assert_named,
    assert_nested,
    clocks,
    load,
)
from helpers.waiting import eventually

LAUNCHED = SCRIPTS / "collect_launched.py"
HOSTS = SCRIPTS / "collect_on_hosts.py"
SECOND = "10.198.7"  # exists within the namespaces only, like the third
THIRD = "fd00:198:7:"
NOBODY = 65534
WAIT_S = 90.0

pytestmark = [
    pytest.mark.skipif(
        os.geteuid() != 0 or not all(shutil.which(tool) for tool in ("ip", "ss", "tc", "setpriv")),
        reason="makes network namespaces: needs root, iproute2 and util-linux",
    ),
    # Each wait has its own deadline; the whole test may take long on a busy machine.
    pytest.mark.timeout(400),
]


class Process:
    """One process, and what it prints."""

    def __init__(self, command: list[str], env: dict[str, str], printed: Path) -> None:
        self._printed = printed
        with printed.open("w") as file:
            self._process = subprocess.Popen(
                command, env=env, stdin=subprocess.PIPE, stdout=file, stderr=file, text=True
            )

    def line(self, wanted: str) -> str:
        """Wait until it prints a line that begins with ``wanted``."""

        def found() -> list[str]:
            lines = self._printed.read_text().split("\n")[:-1]  # the last one may not be whole
            return [line for line in lines if line.startswith(wanted)]

        eventually(found, WAIT_S, about=self._printed.read_text)
        return found()[0]

    def write(self, text: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(text)
        self._process.stdin.flush()

    def output(self, status: int = 0) -> str:
        """Wait for its end; return all that it printed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(WAIT_S)
        assert self._process.poll() == status, self._printed.read_text()
        return self._printed.read_text()

    def end(self) -> None:
        self._process.kill()
        with contextlib.suppress(OSError):
            self._process.communicate()


class Network:
    """Hosts, and processes on them."""

    def __init__(self, hosts: Hosts, marked: Marked, folder: Path) -> None:
        self._folder = folder
        self._marked = marked
        self._on = hosts.on
        self._env = {**os.environ, **hosts.env}
        self._started: list[Process] = []

    def start(self, host: int, *command: object, **env: str) -> Process:
        printed = self._folder / f"printed{len(self._started)}"
        process = Process([*self._on(host), *map(str, command)], {**self._env, **env}, printed)
        self._started.append(process)
        return process

    def torchrun(self, host: int, *command: object, **env: str) -> Process:
        module = ("-m", "torch.distributed.run", "--rdzv-backend=c10d")
        return self.start(host, sys.executable, *module, *command, **env)

    def cable(self, host: int, state: str) -> None:
        """Pull the cable of all traffic ("down"), or plug it in again ("up")."""
        self.start(host, "ip", "link", "set", "eth1", state).output()

    def end(self) -> None:
        self._marked.kill()  # the processes in the namespaces
        for process in self._started:
            process.end()


@pytest.fixture(scope="module")
def hosts(three_hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Hosts:
    folder = tmp_path_factory.mktemp("names")
    hosts = three_hosts
    for host in (1, 2, 3):
        hosts.do(host, "cable", "eth1", f"{SECOND}.{host}/24")
        hosts.do(host, "cable", "eth2", f"{THIRD}:{host}/64")
        names = ["127.0.0.1 localhost", f"127.0.1.1 node{host}"]
        names += [f"{SECOND}.{other} node{other}" for other in (1, 2, 3) if other != host]
        file = folder / f"hosts{host}"
        file.write_text("\n".join(names) + "\n")
        bind = ["mount", "--bind", str(file), "/etc/hosts"]
        subprocess.run(
            [*hosts.on(host), *bind], check=True, timeout=20, env={**os.environ, **hosts.env}
        )
    return hosts


@pytest.fixture
def network(hosts: Hosts, marked: Marked, tmp_path: Path) -> Iterator[Network]:
    network = Network(hosts, marked, tmp_path)
    yield network
    network.end()


def reports(ranks: list[Process]) -> list[dict[str, object]]:
    lines = [line for rank in ranks for line in rank.output().splitlines()]
    [line] = [line for line in lines if line.startswith('[{"shape"')]
    found: list[dict[str, object]] = json.loads(line)
    return found


def command_of_nobody() -> list[str]:
    """Runs this Python as another user, or as this one if the other can't read it."""
    become = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    again = "import os, sys, torch; os.execv(sys.executable, [sys.executable, '-c', ''])"
    # A Python in a home folder may have a copy in a public place.
    name = "python{}.{}".format(*sys.version_info[:2])
    for python in filter(None, (sys.executable, shutil.which(name, path="/usr/bin"))):
        tried = subprocess.run(
            [*become, python, "-c", again],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            check=False,
            capture_output=True,
        )
        if tried.returncode == 0:
            return [*become, python]
    return [sys.executable]


def own_clocks(network: Network) -> bool:
    """Give each host its own monotonic clock, ahead by its number in hours, if possible."""
    said = network.start(3, "cat", "/proc/self/timens_offsets").output()
    return re.search(r"^monotonic +10800 +0$", said, re.M) is not None


def check_trace(path: Path, *, own_clocks: bool) -> None:
    """Three hosts share one time line: earlier events come first."""
    events = load(path)
    workers = ("worker 0", "worker 1")
    assert_named(events, {"trainer", *workers})
    assert_nested(events)
    hours = set()
    for worker in workers:
        assert_answered(events, worker)
        told = clocks(events, worker)
        for ahead_s, error_s in told:
            hours.add(round(ahead_s / 3600))
            # The clocks in the file are right, to the nanosecond.
            assert abs(ahead_s - 3600 * round(ahead_s / 3600)) <= error_s + 1e-9 < 5
        assert_in_order(events, worker, error_us=1e6 * max(error_s for _, error_s in told))
    assert hours == ({1, 2} if own_clocks else {0})


def test_two_launches_at_once(network: Network, tmp_path: Path) -> None:
    """Two runs on the same hosts; the second by another user, if that one can run Python."""
    traces = {"DISTCOLLECT_TEST_TRACE": str(tmp_path / "trace")}
    as_nobody = command_of_nobody()
    first = ("--nnodes=3", "--nproc-per-node=1", "--rdzv-endpoint=node1:29511", "--rdzv-id=first")
    mine = [network.torchrun(host, *first, LAUNCHED, **traces) for host in (1, 2, 3)]
    second = ("--nnodes=2", "--nproc-per-node=2", "--rdzv-endpoint=node3:29512", "--rdzv-id=second")
    command = [*as_nobody, "-m", "torch.distributed.run", "--rdzv-backend=c10d", *second]
    path = os.pathsep.join(filter(None, sys.path))
    theirs = [network.start(host, *command, LAUNCHED, PYTHONPATH=path) for host in (2, 3)]
    for seen in reports(mine):
        assert seen["workers"] == [0, 1]
        assert seen["workers whose memory is mapped"] == 0
        assert seen["listening"] == [f"{SECOND}.1"]
    for seen in reports(theirs):
        assert seen["workers"] == [0, 1, 2]
        assert seen["listening"] == [f"{SECOND}.2"]
        # The trainer's host runs one of them.
        assert seen["workers whose memory is mapped"] == 1
    for number in (0, 1):
        check_trace(tmp_path / f"trace.{number}", own_clocks=own_clocks(network))


def test_ipv6(network: Network) -> None:
    options = ("--nnodes=2", "--nproc-per-node=1", f"--rdzv-endpoint=[{THIRD}:1]:29513")

    def more(host: int) -> tuple[str, ...]:
        # Torchrun doesn't recognize its own host by an address if the host has such a name.
        return (f"--local-addr={THIRD}:{host}", "--rdzv-conf", f"is_host={int(host == 1)}")

    ranks = [network.torchrun(h, *options, *more(h), LAUNCHED) for h in (1, 2)]
    for seen in reports(ranks):
        assert seen["workers"] == [0]
        assert seen["listening"] == [f"[{THIRD}:1]"]


def test_a_slow_link_and_cables_that_are_pulled(network: Network) -> None:
    options = ("--nnodes=3", "--nproc-per-node=1", "--rdzv-endpoint=node1:29514")
    trainer, *_ = [network.torchrun(h, *options, HOSTS, "cables") for h in (1, 2, 3)]
    measured = json.loads(trainer.line('{"wire"'))
    # One copy of each observation and at most 3% more; except for one rollout of
    # each worker, of 32 in all, that was being sent when counting began or ended.
    assert 0.9 < measured["wire"] < 1.15
    trainer.line("running")
    network.cable(3, "down")
    threading.Event().wait(5)  # how long the cable is out
    network.cable(3, "up")
    trainer.write("\n")
    trainer.line("again")
    network.cable(3, "down")
    trainer.line("lost")
    # Torchrun itself waits some minutes for the lost host.
    trainer.line("done")
    network.cable(3, "up")


@pytest.mark.parametrize("who", [pytest.param("a rank", marks=pytest.mark.slow), "the trainer"])
def test_restarts(network: Network, marked: Marked, who: str) -> None:
    """One rank fails: torchrun starts all again, and nothing old disturbs them."""
    options = ("--nnodes=2", "--nproc-per-node=1", "--rdzv-endpoint=node1:29515")
    options = (*options, f"--rdzv-id={who[:3]}", "--max-restarts=1")
    what, env = ("collect", {"DISTCOLLECT_TEST_DEADLY_ATTEMPT": "0"})
    if who == "the trainer":
        what, env = ("restart", {})
    ranks = [network.torchrun(h, *options, HOSTS, what, **env) for h in (1, 2)]
    said = [line for line in ranks[0].output().splitlines() if line in ("workers 1", "done")]
    assert said[-2:] == ["workers 1", "done"]
    assert said.count("workers 1") == 2
    ranks[1].output()
    assert marked.gone()


def test_a_host_joins_an_elastic_launch(network: Network, marked: Marked) -> None:
    """Torchrun starts all ranks again, with those of the new host; this is no restart.

    With a store that torchrun shares between its rounds, the new host is never admitted.
    """
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    options = ("--nnodes=1:3", "--nproc-per-node=2", "--max-restarts=0")
    options = (*options, "--rdzv-endpoint=node1:29516", "--rdzv-conf", "last_call_timeout=1")
    first = network.torchrun(1, *options, HOSTS, "elastic", **env)
    first.line("workers 1")
    second = network.torchrun(2, *options, HOSTS, "elastic", **env)
    first.line("workers 3")
    first.line("done")
    first.output()
    second.output()
    assert marked.gone()


def test_srun_where_names_stand_for_127_0_1_1(network: Network) -> None:
    command = (sys.executable, LAUNCHED)
    ranks = [network.start(1 + rank, *command, **slurm_variables(rank, 2, 1)) for rank in (0, 1)]
    for seen in reports(ranks):
        assert seen["workers"] == [0]
        assert seen["listening"] == [f"{SECOND}.1"]


@pytest.mark.parametrize("transport", ["rpc", pytest.param("tcp", marks=pytest.mark.slow)])
def test_doctor_by_torchrun(network: Network, tmp_path: Path, transport: str) -> None:
    """It finds the wrong names, and nothing else; it uses the user's own token."""
    file = tmp_path / "token"
    file.touch(0o600)
    file.write_text("a secret of ours")
    options = ("--nnodes=3", "--nproc-per-node=1", "--rdzv-endpoint=node1:29517", "--no-python")
    command = (*options, sys.executable, "-m", "distcollect", "doctor")
    token = {"DISTCOLLECT_TOKEN_FILE": str(file), "DISTCOLLECT_TRANSPORT": transport}
    trainer, *_ = [network.torchrun(h, *command, **token) for h in (1, 2, 3)]
    said = trainer.output(status=1)
    for host in (1, 2, 3):
        assert re.search(rf"^ +{host - 1} +node{host} +{SECOND}\.{host} +eth1 ", said, re.M), said
        assert f"rank {host - 1} (node{host})" in said
    for rank in (1, 2):
        assert re.search(
            rf"^ +{rank} +node\d +[\d.]+ ms +(?:\d+\.\d\d|[\d,]+) MB/s +(?:\d+\.\d\d|[\d,]+) MB/s",
            said,
            re.M,
        ), said
    assert "weights to all 2 workers" in said
    joined = f"{transport!r}: workers join at {SECOND}.1:\\d+; who knows the token may connect; TLS"
    assert re.search(joined, said), said
    assert ("whoever reaches" in said) == (transport == "rpc")
    assert len(re.findall(r"^\d+\. names, ", said, re.M)) == 3, said
    assert len(re.findall(r"what to do", said)) == 3, said
    assert f"--local-addr={SECOND}.2" in said


def test_doctor_finds_closed_ports(network: Network) -> None:
    """A firewall lets only the trainer's port through."""
    # Testbed kernels have no other packet filter: packets from and to ports that
    # happen to be free are routed nowhere.
    ports = "32768-60999"
    blocked = f"ip rule add pref 5 ipproto tcp sport {ports} dport {ports} blackhole"
    network.start(
        2, "sh", "-ec", f"{blocked}; ip rule add pref 10 lookup local; ip rule del pref 0"
    ).output()
    command = (sys.executable, "-m", "distcollect", "doctor")
    ranks = [network.start(1 + rank, *command, **slurm_variables(rank, 2, 1)) for rank in (0, 1)]
    try:
        said = ranks[0].output(status=1)
    finally:
        mend = "ip rule add pref 0 lookup local; ip rule del pref 10; ip rule del pref 5"
        network.start(2, "sh", "-ec", mend).output()
    assert "links, trainer and rank 1 (node2): no answer within 10 s" in said
    assert "what to do: let the hosts reach each other on all TCP ports from 1024 on" in said


def test_rpc_refuses_a_public_address(network: Network) -> None:
    add = "ip link add public0 type bridge; ip addr add 8.8.4.4/32 dev public0"
    network.start(1, "sh", "-ec", f"{add}; ip link set public0 up").output()
    start = "from distcollect.transport.rpc import RpcTransport; RpcTransport('8.8.4.4')"
    said = network.start(1, sys.executable, "-c", start).output(status=1)
    assert "LaunchError: refusing to listen on the public address 8.8.4.4" in said
