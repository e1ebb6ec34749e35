"""Who joins from outside: supervisors on this machine, and on hosts that are network namespaces."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from chaos.envs import JOINER_VARIABLE, Record

_SHARED = "/dev/shm/"
_MARK_VARIABLE = "DISTCOLLECT_CHAOS_MARK"
_HERE = 0  # this machine, outside of all namespaces


class Hosts:
    """Hosts as network namespaces (``tests/helpers/testbed``), which only root can make.

    Attributes:
        numbers: of those that take part; none without a testbed.
        address: of this machine as they see it.
    """

    def __init__(self, testbed: Path | None) -> None:
        """Have none yet."""
        self._testbed = testbed
        self.numbers: tuple[int, ...] = ()
        self.address = "127.0.0.1"
        # Names of our own: the machine may have other testbeds.
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
        """Do something to a host: see ``netns_host.sh``."""
        self._call("netns_host.sh", str(host), *action)

    def on(self, host: int) -> list[str]:
        """What to put before a command that is to run there."""
        if host == _HERE:
            return []
        assert self._testbed is not None
        return [str(self._testbed / "netns_exec.sh"), str(host)]

    @property
    def env(self) -> Mapping[str, str]:
        """Variables that the commands need."""
        return self._env

    def files(self) -> list[str]:
        """What lies in the hosts' shared memory."""
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
    """A process that was told to join: ``distcollect worker --join``.

    Attributes:
        number: tells it from all others; its workers' records have it.
        host: where it runs, 0 for here.
        process: it, or what runs it on its host.
        output: what it said.
        may_end: it was told to, or was harmed.
    """

    number: int
    host: int
    process: subprocess.Popen[bytes]
    output: Path
    may_end: bool = False

    def pid(self) -> int | None:
        """Of the supervisor itself, here; None: it is not there."""
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
    """Starts and ends them.

    Attributes:
        all: those that were started in this round.
    """

    def __init__(self, hosts: Hosts, folder: Path, token_file: Path) -> None:
        """Their output goes into ``folder``."""
        self.all: list[Joiner] = []
        self._hosts = hosts
        self._folder = folder
        self._token_file = token_file
        self._numbers = itertools.count()

    def start(self, host: int, address: str) -> Joiner:
        """Have one join the trainer at ``address``."""
        number = next(self._numbers)
        output = self._folder / f"joiner-{number}.log"
        command = [sys.executable, "-m", "distcollect", "worker", "--join", address]
        with output.open("wb") as file:
            process = subprocess.Popen(
                [*self._hosts.on(host), *command, "--threads", "1", "--wait", "20"],
                env={
                    **os.environ,
                    **self._hosts.env,
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
        """Wait for all to end; what was wrong with that, in words."""
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


class Marked:
    """The processes that were started under a mark in the environment."""

    def __init__(self) -> None:
        """From now on all processes that this one starts carry it."""
        os.environ[_MARK_VARIABLE] = uuid.uuid4().hex
        self._entry = f"{_MARK_VARIABLE}={os.environ[_MARK_VARIABLE]}".encode()
        self._files: set[str] = set()

    def pids(self) -> list[int]:
        """Of those that run."""
        found = []
        for pid, folder in _processes():
            with contextlib.suppress(OSError):
                if self._entry in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(pid)
        return [pid for pid in found if pid != os.getpid()]

    def note_files(self) -> None:
        """Take down which files in /dev/shm they use; those must go with them."""
        for pid in self.pids():
            folder = Path(f"/proc/{pid}")
            with contextlib.suppress(OSError):
                words = (folder / "maps").read_text().split()
                links = [str(link.readlink()) for link in (folder / "fd").iterdir()]
                self._files |= {name for name in (*words, *links) if name.startswith(_SHARED)}

    def files(self) -> list[str]:
        """Those of them that are there."""
        return [name for name in sorted(self._files) if Path(name).exists()]

    def describe(self) -> list[str]:
        """The processes that run, in words."""
        lines = []
        for pid in self.pids():
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                lines.append(f"process {pid}: {command[:120]!r}")
        return lines

    def kill(self) -> None:
        """End them."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def pid_of(record: Record) -> int | None:
    """The id of a record's process here, whatever it is where it runs; None: it is gone."""
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
