"""Starts Ray for tests, and finds what workers leave behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.paths import ROOT, TESTS

RAY = Path(sys.executable).with_name("ray")
SCRIPT = Path(__file__).with_name("scripts") / "collect_with_ray.py"
needs_ray = pytest.mark.skipif(
    not RAY.exists(), reason="Ray is not installed: pip install 'distcollect[ray]'"
)
OPTIONS = ("--disable-usage-stats", "--include-dashboard=false", "--object-store-memory=80000000")
_LIMIT_S = 100


def environment(**more: str) -> dict[str, str]:
    """For Ray and for drivers: everything imports this checkout."""
    path = os.pathsep.join([str(ROOT), str(TESTS), os.environ.get("PYTHONPATH", "")])
    # Ray would put a token into the home folder.
    settings = {"RAY_AUTH_MODE": "disabled", "RAY_DEDUP_LOGS": "0"}
    return {**os.environ, "PYTHONPATH": path, **settings, **more}


@contextlib.contextmanager
def one_node(num_cpus: int) -> Iterator[str]:
    """A Ray instance on this host alone; its address."""
    # A short path: it becomes part of the names of sockets.
    folder = Path(tempfile.mkdtemp(prefix="dcray", dir="/tmp"))
    process = subprocess.Popen(
        [
            *(str(RAY), "start", "--head", "--block", "--port=0", f"--num-cpus={num_cpus}"),
            *("--node-ip-address=127.0.0.1", f"--temp-dir={folder}", *OPTIONS),
        ],
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield _address(process)
    finally:
        process.terminate()  # ends the whole instance, and no other one
        process.communicate(timeout=_LIMIT_S)
        shutil.rmtree(folder, ignore_errors=True)


def _address(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if "--address='" in line:
            return line.partition("--address='")[2].partition("'")[0]
    raise AssertionError("".join(said))


def workers_of_ray(pids: list[int]) -> list[str]:
    """Of these processes those that belong to workers, and not to Ray itself."""
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            if "distcollect.worker" in command or command.startswith("ray::RayWorker"):
                found.append(f"{pid}: {command[:80]}")
    return found
