"""The file ``stats.jsonl`` that a run writes into its folder: one snapshot in each line.

A run may be killed while it writes a line, and be resumed in the same folder. A reader may read
while a line is being written. So readers skip every line that is no snapshot.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import logging
import os
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

from distcollect.common.refusing import refusing
from distcollect.errors import ArgumentError
from distcollect.results import Stats
from distcollect.telemetry.bottleneck import find_bottleneck

log = logging.getLogger("distcollect")

STATS_FILE = "stats.jsonl"

# Longer lines, as with hundreds of workers, are written less often: at most some 50 MB an hour.
_LINE_BYTES = 1 << 16
_BLOCK_BYTES = 1 << 16  # what is read first of the end, by `top` every second

Snapshot = Mapping[str, Any]


class JsonLines:
    """Writes the file.

    A line holds :meth:`Stats.as_dict`, and also

    - "time": the time of the snapshot, in seconds since 1970;
    - "bottleneck": :func:`~.bottleneck.find_bottleneck` of it, in words;
    - "collector_id": an id of the collector that wrote the line.
    """

    def __init__(self, path: Path, every_s: float) -> None:
        """Append to ``path``; or if another collector is writing to it, to a new file beside it."""
        self._file = _open_alone(path)
        self.about = str(self._file.name)
        self.every_s = self._shortest_s = every_s
        self._id = secrets.token_hex(6)

    def write(self, stats: Stats) -> None:
        """Write a line, which other processes see at once."""
        about = {"time": time.time(), "collector_id": self._id}
        line = {**about, **stats.as_dict(), "bottleneck": str(find_bottleneck(stats))}
        text = json.dumps(line, separators=(",", ":"), allow_nan=False)
        data = f"{text}\n".encode()
        self.every_s = self._shortest_s * max(1.0, len(data) / _LINE_BYTES)
        _write_all(self._file, data)

    def close(self) -> None:
        """Close the file, so that another collector may write to it."""
        with contextlib.suppress(OSError):
            # Processes that were forked meanwhile still have it open.
            fcntl.flock(self._file, fcntl.LOCK_UN)
        self._file.close()


def _open_alone(path: Path) -> FileIO:
    """Open and lock a file to append to, at the start of a line.

    It has no buffer: a full disk or a fork would write a buffered line twice.
    """
    for number in itertools.count(1):
        name = path if number == 1 else path.with_stem(f"{path.stem}-{number}")
        file = FileIO(name, "a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            continue
        except OSError:
            log.debug("%s can't be locked: this disk supports no locks", name)
        if number > 1:
            log.warning("another collector writes to %s: this one writes to %s", path, name)
        size = file.seek(0, os.SEEK_END)
        if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
            _write_all(file, b"\n")  # the last run was killed while writing
        return file
    raise AssertionError


def _write_all(file: FileIO, data: bytes) -> None:
    while data:
        # A nearly full disk takes only a part; the next call then raises.
        data = data[file.write(data) or 0 :]


def stats_file(run: Path) -> Path:
    """The statistics file in a run's folder, or ``run`` itself if it is a file.

    Raises:
        ArgumentError: there is no such file.
    """
    file = run / STATS_FILE if run.is_dir() else run
    if not file.is_file():
        raise ArgumentError(
            f"{run}: there is no {STATS_FILE}; name the folder that was the run's run_dir, as in "
            "Monitor(run_dir=...)"
        )
    return file


@contextlib.contextmanager
def opened(file: Path) -> Iterator[BinaryIO]:
    """Open a statistics file for reading.

    Raises:
        ArgumentError: it can't be read.
    """
    remedy = "name a run's folder that you may read"
    with refusing(f"{file} can't be read", remedy), file.open("rb") as lines:
        yield lines


def snapshots(lines: Iterable[bytes]) -> Iterator[Snapshot]:
    """The snapshots in ``lines``; other lines are skipped."""
    for line in lines:
        try:
            snapshot = json.loads(line)
        except ValueError:
            continue
        if isinstance(snapshot, Mapping) and snapshot.keys() >= {"time", "frames_per_s"}:
            yield snapshot


def newest(file: Path) -> Snapshot | None:
    """The last snapshot in ``file``; None: there is none yet. Only the end of the file is read.

    Raises:
        ArgumentError: the file can't be read.
    """
    with opened(file) as lines:
        end = lines.seek(0, os.SEEK_END)
        size = _BLOCK_BYTES
        while True:
            start = lines.seek(max(0, end - size))
            # The first line may be incomplete.
            tail = lines.read(end - start).splitlines()[start > 0 :]
            found = next(snapshots(reversed(tail)), None)
            if found is not None or start == 0:
                return found
            size *= 4
