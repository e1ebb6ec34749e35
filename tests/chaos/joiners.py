"""Supervisors that join from outside: on this machine, and on network namespaces."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from helpers.hosts import Hosts

from chaos.envs import JOINER_VARIABLE, Record


@dataclass(eq=False)
class Joiner:
    """A process that joins the trainer: ``distcollect worker --join``.

    Attributes:
        number: identifies it; the records of its workers contain it.
        host: the number of its host; 0 is this machine, outside of all namespaces.
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

    def __init__(self, hosts: Hosts | None, folder: Path, token_file: Path) -> None:
        """Write the joiners' output into ``folder``; ``hosts``: None if there is only this one."""
        self.all: list[Joiner] = []
        self._hosts = hosts
        self._folder = folder
        self._token_file = token_file
        self._numbers = itertools.count()

    def start(self, host: int, address: str) -> Joiner:
        """Start a joiner on a host for the trainer at ``address``."""
        number = next(self._numbers)
        output = self._folder / f"joiner-{number}.log"
        command = [sys.executable, "-m", "distcollect", "worker", "--join", address]
        there: list[str] = []
        variables = {**os.environ}
        if host:
            assert self._hosts is not None
            there = self._hosts.on(host)
            variables.update(self._hosts.env)
        with output.open("wb") as file:
            process = subprocess.Popen(
                [*there, *command, "--threads", "1", "--wait", "20"],
                env={
                    **variables,
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
                return pid
    return None


def _processes() -> Iterator[tuple[int, Path]]:
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            yield int(folder.name), folder
