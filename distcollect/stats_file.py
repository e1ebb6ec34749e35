"""The file ``stats.jsonl`` that a run writes into its folder: one snapshot in each line.

A run may be killed while it writes a line, and go on in the same folder later; and who reads may
come while a line is being written. So a line that is no snapshot is passed over, wherever it is.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from .errors import ArgumentError
from .stats import Stats
from .verdict import verdict

STATS_FILE = "stats.jsonl"

_BLOCK_BYTES = 1 << 16

Snapshot = Mapping[str, Any]


class JsonLines:
    """Writes them.

    A line holds :meth:`Stats.as_dict`, and besides

    - "time": when, in seconds since 1970;
    - "verdict": :func:`~.verdict.verdict` of it, in words;
    - "collector_id": the same in all lines of a collector, and only in these.
    """

    def __init__(self, path: Path, every_s: float) -> None:
        """Append to ``path``."""
        self.every_s = every_s
        self._id = uuid.uuid4().hex[:12]
        self._file = path.open("a+b")
        if self._file.seek(0, os.SEEK_END):
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":
                self._file.write(b"\n")  # who wrote before was killed within a line

    def write(self, stats: Stats) -> None:
        """A line, visible to others at once."""
        about = {"time": time.time(), "collector_id": self._id}
        line = {**about, **stats.as_dict(), "verdict": str(verdict(stats))}
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def stats_file(run: Path) -> Path:
    """The file of a run's folder; or ``run`` itself, if it is one.

    Raises:
        ArgumentError: there is none, or it can't be read.
    """
    file = run / STATS_FILE if run.is_dir() else run
    if not file.is_file():
        raise ArgumentError(
            f"{run}: there is no {STATS_FILE}; name the folder that was the run's run_dir, as in "
            "Monitor(run_dir=...)"
        )
    if not os.access(file, os.R_OK):
        raise ArgumentError(f"{file} can't be read: you may not")
    return file


def snapshots(lines: Iterable[bytes]) -> Iterator[Snapshot]:
    """Those of ``lines`` that are snapshots."""
    for line in lines:
        try:
            told = json.loads(line)
        except ValueError:
            continue
        if isinstance(told, Mapping) and "time" in told and "frames_per_s" in told:
            yield told


def newest(file: Path) -> Snapshot | None:
    """The last snapshot in ``file``, of which only the end is read; None: there is none yet."""
    size = _BLOCK_BYTES
    with file.open("rb") as lines:
        end = lines.seek(0, os.SEEK_END)
        while True:
            start = lines.seek(max(0, end - size))
            # The first may be the end of a line.
            tail = lines.read(end - start).splitlines()[start > 0 :]
            found = next(snapshots(reversed(tail)), None)
            if found is not None or start == 0:
                return found
            size *= 4
