"""Training by torchrun over hosts with networks, names and troubles of their own.

They are network namespaces on this machine. Each has two IPv4 networks and one IPv6 network, and
as on Debian its own name stands for 127.0.1.1; the others know it by its address on the second.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from scripts.marked import Marked

from distcollect.chaos.hosts import Hosts

HERE = Path(__file__).parent
LAUNCHED = HERE / "scripts" / "launched.py"
HOSTS = HERE / "scripts" / "hosts.py"
TESTBED = HERE / "testbed"
SECOND = "10.198.7"  # within the namespaces alone, as the third
THIRD = "fd00:198:7:"
NOBODY = 65534

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not all(shutil.which(tool) for tool in ("ip", "ss", "tc", "setpriv")),
    reason="makes network namespaces: needs root, iproute2 and util-linux",
)


class Network:
    """The hosts, and processes on them."""

    def __init__(self, hosts: Hosts, marked: Marked) -> None:
        self._marked = marked
        self._on = hosts.on
        self._env = {**os.environ, **hosts.env}
        self._started: list[subprocess.Popen[str]] = []

    def start(self, host: int, *command: object, **env: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*self._on(host), *map(str, command)],
            env={**self._env, **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._started.append(process)
        return process

    def torchrun(
        self, host: int, script: Path, *arguments: str, options: tuple[str, ...], **env: str
    ) -> subprocess.Popen[str]:
        command = (sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=c10d")
        return self.start(host, *command, *options, script, *arguments, **env)

    def end(self) -> None:
        self._marked.kill()  # first what runs in the namespaces: it holds the pipes open
        for process in self._started:
            process.kill()
            process.communicate()
        self._started.clear()


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    folder = tmp_path_factory.mktemp("names")
    hosts = Hosts(TESTBED)
    try:
        hosts.__enter__()
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"this machine can't make network namespaces: {error}")
    try:
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
        yield hosts
    finally:
        hosts.__exit__()


@pytest.fixture
def network(hosts: Hosts, marked: Marked) -> Iterator[Network]:
    network = Network(hosts, marked)
    yield network
    network.end()


def outputs(processes: list[subprocess.Popen[str]]) -> list[str]:
    """Wait for all; what each said."""
    said = []
    for process in processes:
        out, _ = process.communicate(timeout=110)
        assert process.returncode == 0, out
        said.append(out)
    return said


def read_until(process: subprocess.Popen[str], wanted: str) -> str:
    """Its next line that begins with ``wanted``; pytest's own timeout is the deadline."""
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if line.startswith(wanted):
            return line
    raise AssertionError(f"{wanted!r} never came: {''.join(said)}")


def reports(said: list[str]) -> list[dict[str, object]]:
    [line] = [line for out in said for line in out.splitlines() if line.startswith('[{"shape"')]
    found: list[dict[str, object]] = json.loads(line)
    return found


def command_of_nobody() -> list[str]:
    """Runs this Python as another user; skips where that one may not read it."""
    become = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    again = "import os, sys, torch; os.execv(sys.executable, [sys.executable, '-c', ''])"
    # A Python in somebody's home may have a twin in a public place.
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
    pytest.skip(f"another user can't run Python here: {tried.stderr.decode()[-300:]}")


def test_two_launches_at_once(network: Network) -> None:
    """On the same hosts, one of them by another user, and all names stand for 127.0.1.1 at home."""
    as_nobody = command_of_nobody()
    first = ("--nnodes=3", "--nproc-per-node=1", "--rdzv-endpoint=node1:29511", "--rdzv-id=first")
    mine = [network.torchrun(host, LAUNCHED, options=first) for host in (1, 2, 3)]
    second = ("--nnodes=2", "--nproc-per-node=2", "--rdzv-endpoint=node3:29512", "--rdzv-id=second")
    command = [*as_nobody, "-m", "torch.distributed.run", "--rdzv-backend=c10d", *second]
    path = os.pathsep.join(filter(None, sys.path))
    theirs = [network.start(host, *command, LAUNCHED, PYTHONPATH=path) for host in (2, 3)]
    for seen in reports(outputs(mine)):
        assert seen["workers"] == [0, 1]
        assert seen["listening"] == [f"{SECOND}.1"]
    for seen in reports(outputs(theirs)):
        assert seen["workers"] == [0, 1, 2]
        assert seen["listening"] == [f"{SECOND}.2"]
        # The trainer's own host has one of them.
        assert seen["workers whose memory is mapped"] == 1


def test_ipv6(network: Network) -> None:
    options = ("--nnodes=2", "--nproc-per-node=1", f"--rdzv-endpoint=[{THIRD}:1]:29513")

    def more(host: int) -> tuple[str, ...]:
        # By an address torchrun doesn't know its own host where that has a name like these.
        return (f"--local-addr={THIRD}:{host}", "--rdzv-conf", f"is_host={int(host == 1)}")

    ranks = [network.torchrun(h, LAUNCHED, options=(*options, *more(h))) for h in (1, 2)]
    for seen in reports(outputs(ranks)):
        assert seen["workers"] == [0]
        assert seen["listening"] == [f"[{THIRD}:1]"]


def test_a_slow_link_and_cables_that_are_pulled(network: Network) -> None:
    options = ("--nnodes=3", "--nproc-per-node=1", "--rdzv-endpoint=node1:29514")
    ranks = [network.torchrun(h, HOSTS, "cables", options=options) for h in (1, 2, 3)]
    trainer = ranks[0]
    measured = json.loads(read_until(trainer, '{"wire"'))
    # One copy of each observation, and at most what comes along with it.
    assert 0.9 < measured["wire"] < 1.15
    read_until(trainer, "running")
    pull, put_back = (["ip", "link", "set", "eth1", state] for state in ("down", "up"))
    assert network.start(3, *pull).wait(20) == 0
    threading.Event().wait(5)  # that long is the cable out
    assert network.start(3, *put_back).wait(20) == 0
    assert trainer.stdin is not None
    trainer.stdin.write("\n")
    trainer.stdin.flush()
    read_until(trainer, "again")
    assert network.start(3, *pull).wait(20) == 0
    read_until(trainer, "lost")
    # Torchrun itself waits some minutes for the host that is gone.
    read_until(trainer, "done")
    network.start(3, *put_back).wait(20)


def test_a_rank_is_killed(network: Network, marked: Marked) -> None:
    """Torchrun starts all ranks again; nothing of the first attempt is in their way."""
    options = ("--nnodes=2", "--nproc-per-node=1", "--max-restarts=1")
    options = (*options, "--rdzv-endpoint=node1:29515")
    ranks = [network.torchrun(h, HOSTS, "restart", options=options) for h in (1, 2)]
    said = outputs(ranks)[0].splitlines()
    assert [line for line in said if line in ("workers 1", "done")] == ["workers 1"] * 2 + ["done"]
    assert marked.gone()


def test_a_host_joins_an_elastic_launch(network: Network, marked: Marked) -> None:
    """Torchrun starts all ranks again, with those of the new host; that counts as no restart."""
    options = ("--nnodes=1:3", "--nproc-per-node=2", "--max-restarts=0")
    options = (*options, "--rdzv-endpoint=node1:29516", "--rdzv-conf", "last_call_timeout=1")
    first = network.torchrun(1, HOSTS, "elastic", options=options)
    read_until(first, "workers 1")
    second = network.torchrun(2, HOSTS, "elastic", options=options)
    read_until(first, "workers 3")
    outputs([second])
    read_until(first, "done")
    assert first.wait(30) == 0
    assert marked.gone()
