"""Supervisors that join from outside."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from chaos.envs import JOINER_VARIABLE, Record


@dataclass(eq=False)
class Joiner:
    """A process that joins the trainer: ``distcollect worker --join``.

    Attributes:
        number: identifies it; the records of its workers contain it.
        process: the process.
        output: the file with its output.
        may_end: whether it may end early, because of an order or a fault.
    """

    number: int
    process: subprocess.Popen[bytes]
    output: Path
    may_end: bool = False


class Joiners:
    """Starts joiners, and waits for their ends.

    Attributes:
        all: the joiners of this round.
    """

    def __init__(self, folder: Path, token_file: Path) -> None:
        """Write the joiners' output into ``folder``."""
        self.all: list[Joiner] = []
        self._folder = folder
        self._token_file = token_file
        self._numbers = itertools.count()

    def start(self, address: str) -> Joiner:
        """Start a joiner for the trainer at ``address``."""
        number = next(self._numbers)
        output = self._folder / f"joiner-{number}.log"
        command = [sys.executable, "-m", "distcollect", "worker", "--join", address]
        with output.open("wb") as file:
            process = subprocess.Popen(
                [*command, "--threads", "1", "--wait", "20"],
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),  # of the envs' module
                    JOINER_VARIABLE: str(number),
                    "DISTCOLLECT_TOKEN_FILE": str(self._token_file),
                },
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        joiner = Joiner(number, process, output)
        self.all.append(joiner)
        return joiner

    def end_round(self, timeout_s: float) -> list[str]:
        """Wait until all have ended; return messages about wrong ends."""
        wrong = []
        for joiner in self.all:
            try:
                status = joiner.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                wrong.append(f"joiner {joiner.number} is still there")
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
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            with contextlib.suppress(OSError):
                if name in (folder / "maps").read_text():
                    return int(folder.name)
    return None
