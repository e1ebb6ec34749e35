"""Supervisors that join from outside: on this machine, and on network namespaces."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from chaos.envs import JOINER_VARIABLE, Record

_SHARED = "/dev/shm/"
_HERE = 0  # this machine, outside of all namespaces


class Hosts:
    """Hosts as network namespaces (``tests/helpers/testbed``), which need root.

    Attributes:
        numbers: the numbers of the hosts that take part; empty without a testbed.
        address: the address of this machine for these hosts.
    """

    def __init__(self, testbed: Path | None) -> None:
        """Make no host yet."""
        self._testbed = testbed
        self.numbers: tuple[int, ...] = ()
        self.address = "127.0.0.1"
        # Unique names: the machine may have other testbeds.
        net = f"10.{78 + os.getpid() // 250 % 100}.{os.getpid() % 250}"
        prefix = f"c{os.getpid() % 100_000}"
        self._net = net
        self._env = {"DC_STATE": f"/run/{prefix}", "DC_PREFIX": prefix, "DC_NET": net}

    def __enter__(self) -> Hosts:
        if self._testbed is not None:
            self._call("netns_up.sh")
            self.numbers = (2, 3)
            self.address = f"{self._net}.254"
        return self

    def __exit__(self, *_: object) -> None:
        if self._testbed is not None:
            self._call("netns_down.sh")
            Path(self._env["DC_STATE"] + ".lock").unlink(missing_ok=True)

    def do(self, host: int, *action: str) -> None:
        """Change a host; see ``netns_host.sh``."""
        self._call("netns_host.sh", str(host), *action)

    def on(self, host: int) -> list[str]:
        """The words before a command that make it run on this host."""
        if host == _HERE:
            return []
        assert self._testbed is not None
        return [str(self._testbed / "netns_exec.sh"), str(host)]

    @property
    def env(self) -> Mapping[str, str]:
        """The variables that these commands need."""
        return self._env

    def files(self) -> list[str]:
        """The files in the hosts' shared memory."""
        found = []
        for host in self.numbers:
            listing = subprocess.run(
                [*self.on(host), "ls", _SHARED],
                env={**os.environ, **self._env},
                stdout=subprocess.PIPE,
                text=True,
                check=False,
            )
            found += [f"{name} on host {host}" for name in listing.stdout.split()]
        return found

    def _call(self, script: str, *arguments: str) -> None:
        assert self._testbed is not None
        subprocess.run(
            [str(self._testbed / script), *arguments],
            env={**os.environ, **self._env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=True,
            timeout=60,
        )


@dataclass(eq=False)
class Joiner:
    """A process that joins the trainer: ``distcollect worker --join``.

    Attributes:
        number: identifies it; the records of its workers contain it.
        host: the number of its host; 0 is this machine.
        process: the process, or the command that runs it on its host.
        output: the file with its output.
        may_end: whether it may end early, because of an order or a fault.
    """

    number: int
    host: int
    process: subprocess.Popen[bytes]
    output: Path
    may_end: bool = False

    def pid(self) -> int | None:
        """The supervisor's process id on this machine; None if it has ended."""
        entry = f"{JOINER_VARIABLE}={self.number}".encode()
        for pid, folder in _processes():
            with contextlib.suppress(OSError):
                words = (folder / "cmdline").read_bytes().split(b"\0")
                if (
                    b"--join" in words
                    and words[0] == sys.executable.encode()
                    and entry in (folder / "environ").read_bytes().split(b"\0")
                ):
                    return pid
        return None


class Joiners:
    """Starts joiners, and waits for their ends.

    Attributes:
        all: the joiners of this round.
    """

    def __init__(self, hosts: Hosts, folder: Path, token_file: Path) -> None:
        """Write the joiners' output into ``folder``."""
        self.all: list[Joiner] = []
        self._hosts = hosts
        self._folder = folder
        self._token_file = token_file
        self._numbers = itertools.count()

    def start(self, host: int, address: str) -> Joiner:
        """Start a joiner for the trainer at ``address``."""
        number = next(self._numbers)
        output = self._folder / f"joiner-{number}.log"
        command = [sys.executable, "-m", "distcollect", "worker", "--join", address]
        with output.open("wb") as file:
            process = subprocess.Popen(
                [*self._hosts.on(host), *command, "--threads", "1", "--wait", "20"],
                env={
                    **os.environ,
                    **self._hosts.env,
                    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),  # of the envs' module
                    JOINER_VARIABLE: str(number),
                    "DISTCOLLECT_TOKEN_FILE": str(self._token_file),
                },
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        joiner = Joiner(number, host, process, output)
        self.all.append(joiner)
        return joiner

    def end_round(self, timeout_s: float) -> list[str]:
        """Wait until all have ended; return messages about wrong ends."""
        wrong = []
        for joiner in self.all:
            try:
                status = joiner.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                wrong.append(f"joiner {joiner.number} (host {joiner.host}) is still there")
                joiner.process.kill()
                joiner.process.wait()
                continue
            if status and not joiner.may_end:
                said = joiner.output.read_text(errors="replace")[-2000:]
                wrong.append(f"joiner {joiner.number} ended with status {status}: {said}")
        self.all.clear()
        return wrong


def pid_of(record: Record) -> int | None:
    """The id of a record's process on this machine; None if it has ended."""
    name = f"{record.token:012x}"
    for pid, folder in _processes():
        with contextlib.suppress(OSError):
            if name in (folder / "maps").read_text():
                return pid if pid != os.getpid() else None
    return None


def _processes() -> Iterator[tuple[int, Path]]:
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            yield int(folder.name), folder
