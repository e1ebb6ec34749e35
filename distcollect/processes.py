"""Worker processes on this host: started, watched, and ended for certain.

Each worker leads a session of its own, so that ending its process group also ends what its envs
started, and a Ctrl-C in the terminal reaches the trainer alone. A small guard process outlives
whoever started the workers just long enough to end them: it also covers a ``kill -9`` of the
trainer while an env holds a worker's interpreter lock.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

log = logging.getLogger(__name__)

# sys.path comes first: it may be what makes distcollect importable.
_BOOT = """
import json, sys
boot = json.loads(sys.stdin.readline())
sys.path[:] = boot["sys_path"]
from distcollect.worker import main
main(boot)
"""

# Ends the process groups it was told of ("+PGID", "-PGID") once its parent is gone: the pipe is
# closed, or (when a forked child of the parent holds the pipe open) it has another parent.
_GUARD = """
import os, select, signal, sys
parent, groups, rest = os.getppid(), set(), b""
while True:
    ready, _, _ = select.select([0], [], [], 1.0)
    data = os.read(0, 65536) if ready else None
    if data == b"" or os.getppid() != parent:
        break
    *lines, rest = (rest + (data or b"")).split(b"\\n")
    for line in lines:
        (groups.add if line[:1] == b"+" else groups.discard)(int(line[1:]))
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass
"""


class LocalProcesses:
    """The worker processes that this process has started."""

    def __init__(self, on_exit: Callable[[int, int], None]) -> None:
        """``on_exit(worker_id, exit_code)`` is called on a thread of its own for each that ends."""
        self._on_exit = on_exit
        self._lock = threading.Lock()
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._watchers: list[threading.Thread] = []
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _GUARD],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def spawn(self, worker_id: int, boot: Mapping[str, Any], env: Mapping[str, str]) -> None:
        """Start a worker.

        Args:
            worker_id: its slot; free.
            boot: what :func:`distcollect.worker.main` needs, as JSON on its standard input, where
                no ``ps`` can see the token.
            env: environment variables beside this process's own.
        """
        process = subprocess.Popen(
            [sys.executable, "-c", _BOOT],
            stdin=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, **env},
        )
        self._tell_guard(f"+{process.pid}")
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps({**boot, "sys_path": sys.path}).encode() + b"\n")
            process.stdin.close()
        with self._lock:
            self._running[worker_id] = process
        watcher = threading.Thread(
            target=self._watch, args=(worker_id, process), name="distcollect-watch", daemon=True
        )
        self._watchers = [thread for thread in self._watchers if thread.is_alive()] + [watcher]
        watcher.start()

    def kill(self, worker_id: int) -> None:
        """End a worker at once, and all that it started."""
        with self._lock:
            process = self._running.get(worker_id)
        if process is not None:
            _kill_group(process.pid)

    def close(self, grace_s: float) -> None:
        """Wait up to ``grace_s`` for all to end by themselves, then end them; reap every one."""
        deadline = time.monotonic() + grace_s
        for watcher in self._watchers:
            watcher.join(max(0.0, deadline - time.monotonic()))
        with self._lock:
            remaining = dict(self._running)
        for worker_id, process in remaining.items():
            log.warning("worker %d did not end within %g s: killing it", worker_id, grace_s)
            _kill_group(process.pid)
        for watcher in self._watchers:
            watcher.join(5)
        # Not by closing its pipe: a forked child of this process may hold that open.
        self._guard.kill()
        self._guard.wait(5)
        assert self._guard.stdin is not None
        with contextlib.suppress(OSError):
            self._guard.stdin.close()

    def _watch(self, worker_id: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        # What its envs started doesn't always end with it.
        _kill_group(process.pid)
        self._tell_guard(f"-{process.pid}")
        with self._lock:
            if self._running.get(worker_id) is process:
                del self._running[worker_id]
        self._on_exit(worker_id, code)

    def _tell_guard(self, line: str) -> None:
        assert self._guard.stdin is not None
        with self._lock, contextlib.suppress(OSError, ValueError):
            self._guard.stdin.write(line.encode() + b"\n")
            self._guard.stdin.flush()


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def describe_exit(code: int) -> str:
    """How a process ended: 'exit code 1', or 'killed by SIGKILL'."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
