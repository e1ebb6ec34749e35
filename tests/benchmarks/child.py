"""The process in which one part is measured: ``python -m benchmarks.child``.

Its standard input stays open while the benchmark runs. When the benchmark ends, even by
``kill -9``, this process ends itself and all that it started.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import threading
import warnings
from pathlib import Path

from benchmarks.items import ITEMS
from distcollect.common.files import replacing


def main() -> None:
    """Measure a part, write the result to a file as JSON, and end at once."""
    parser = argparse.ArgumentParser()
    parser.add_argument("item")
    parser.add_argument("part")
    parser.add_argument("seconds", type=float)
    parser.add_argument("result", type=Path)
    given = parser.parse_args()
    threading.Thread(target=_end_with_parent, args=(given.result.parent,), daemon=True).start()
    warnings.simplefilter("ignore")
    outcome: dict[str, object]
    try:
        outcome = {"values": ITEMS[given.item].parts[given.part].run(given.seconds)}
    except Exception as error:  # noqa: BLE001 - a peer's error is its result
        outcome = {"failed": f"{type(error).__name__}: {error}"}
    with replacing(given.result) as file:
        file.write(json.dumps(outcome).encode())
    # Peers may have threads and processes that end late, or never.
    os._exit(0)


def _end_with_parent(folder: Path) -> None:
    # Not through sys.stdin: a process forked meanwhile would find its lock taken.
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    shutil.rmtree(folder, ignore_errors=True)  # the benchmark can't do it any more
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
