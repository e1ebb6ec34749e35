"""Runs the judges' script under conditions that a launcher, a shell or a user may set."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from helpers.descendants import command_of, links_of, with_variable
from helpers.paths import SCRIPTS

SCRIPT = SCRIPTS / "judge_run.py"
LIMIT_S = 150
_END_S = 30
MARK = "JUDGE_MARK"
# A shell would set handlers of its own.
_BEGIN = """
import json, os, signal, sys
given = json.loads(sys.argv[1])
for number in given["ignored"]:
    signal.signal(number, signal.SIG_IGN)
for fd in given["closed"]:
    os.close(fd)
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


@dataclass(frozen=True)
class Ended:
    """How the script ended.

    Attributes:
        code: its exit code.
        seen: what it wrote down, by name.
        output: its stdout and stderr.
        left: what was started, directly or not, and goes on 30 s later.
    """

    code: int
    seen: dict[str, Any]
    output: str
    left: list[str]


@dataclass
class Condition:
    """What the script runs under.

    Attributes:
        ignored: signals that are ignored when it starts.
        closed: which of the descriptors 0, 1 and 2 are closed when it starts.
        options: of Python.
        env: environment variables to set.
        folder: where it starts.
    """

    ignored: Sequence[signal.Signals] = ()
    closed: Sequence[int] = ()
    options: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    folder: Path | None = None

    def run(self, folder: Path, *steps: str) -> Ended:
        """Run these steps of the script; ``folder`` takes its files."""
        seen, said = folder / "seen.json", folder / "said.txt"
        given = {"ignored": [int(number) for number in self.ignored], "closed": [*self.closed]}
        begin = [sys.executable, "-I", "-S", "-c", _BEGIN, json.dumps(given)]
        mark = uuid.uuid4().hex
        with said.open("wb") as output:
            process = subprocess.Popen(
                [*begin, *self.options, str(SCRIPT), str(seen), *steps],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self.folder or folder,
                env={**os.environ, "DISTCOLLECT_VIEW": "0", MARK: mark, **self.env},
                start_new_session=True,
            )
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not end:\n{said.read_text()[-3000:]}") from None
        finally:
            left = _left(mark)
            process.kill()
            process.wait()
        written = json.loads(seen.read_text()) if seen.exists() else {}
        return Ended(code, written, said.read_text()[-5000:], left)


def _left(mark: str) -> list[str]:
    """Wait until all with this mark have ended; those that don't are killed, and returned."""
    deadline = time.monotonic() + _END_S
    while (found := with_variable(MARK, mark)) and time.monotonic() < deadline:
        time.sleep(0.02)
    left = [f"{pid}: {command_of(pid)}" for pid in found]
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return left


def listening_ports(pid: int) -> list[int]:
    """The TCP ports at which a process listens."""
    inodes = set(links_of(pid))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in inodes:
                found.append(int(words[1].rpartition(":")[2], 16))
    return sorted(found)
