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
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distcollect.common.step_counter import SharedStepCounter

log = logging.getLogger(__name__)

# A look at a few numbers of each worker.
_WATCHDOG_PERIOD_S = 1.0

# sys.path comes first: it may be what makes distcollect importable.
_BOOT = """
import json, os, sys
boot = json.loads(sys.stdin.readline())
# Before anything makes threads.
if boot.get("cores"):
    os.sched_setaffinity(0, boot["cores"])
sys.path[:] = boot["sys_path"]
from distcollect.worker.main import main
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


@dataclass(frozen=True)
class End:
    """How a process ended.

    Attributes:
        code: its exit code, -N if signal N ended it.
        stepped: frames that it had stepped.
        reason: why it was ended, if it was by its watchdog.
    """

    code: int
    stepped: int
    reason: str = ""

    def __str__(self) -> str:
        return self.reason or describe_exit(self.code)


class ProcessEvents:
    """What is reported of worker processes, on threads of their own."""

    def exited(self, worker_id: int, incarnation: int, end: End) -> None:
        """A process has ended and was reaped."""

    def bloated(self, worker_id: int, incarnation: int, num_bytes: int) -> None:
        """A process takes more memory than it may; said again and again."""


@dataclass
class _Running:
    """A process, and what its watchdog has seen of it.

    Attributes:
        step_timeout_s: it is ended when it finishes no step for so long; None: never.
        max_bytes: more than this is reported; None: never.
        stepped: frames when they last changed, or when it began to step.
        since: when that was.
        reason: why the watchdog has ended it.
    """

    process: subprocess.Popen[bytes]
    vitals: SharedStepCounter
    step_timeout_s: float | None
    max_bytes: int | None
    stepped: int = -1
    since: float = 0.0
    reason: str = ""


class LocalProcesses:
    """The worker processes that this process has started."""

    def __init__(self, events: ProcessEvents) -> None:
        """Report to ``events``."""
        self._events = events
        self._lock = threading.Lock()
        self._running: dict[tuple[int, int], _Running] = {}
        self._watchers: list[threading.Thread] = []
        self._closed = threading.Event()
        self._watchdog: threading.Thread | None = None
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _GUARD],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def spawn(
        self, worker_id: int, incarnation: int, boot: Mapping[str, Any], env: Mapping[str, str]
    ) -> None:
        """Start a worker.

        Args:
            worker_id: its slot.
            incarnation: the how-manieth process in it.
            boot: what :func:`distcollect.worker.main.main` needs, as JSON on standard input, where
                no ``ps`` can see the token. Its "step_timeout_s" and "max_bytes" are for the
                watchdog; "cores" are those that it is to run on, None: any.
            env: environment variables beside this process's own.

        Raises:
            OSError: the system can't start it.
        """
        vitals = SharedStepCounter()
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", _BOOT],
                stdin=subprocess.PIPE,
                start_new_session=True,
                env={**os.environ, **env},
                pass_fds=[vitals.fd],
            )
            self._tell_guard(f"+{process.pid}")
            told = {
                **boot,
                "worker_id": worker_id,
                "incarnation": incarnation,
                "vitals": vitals.fd,
                "sys_path": sys.path,
            }
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps(told).encode() + b"\n")
                process.stdin.close()
        finally:
            vitals.close()
        running = _Running(process, vitals, boot.get("step_timeout_s"), boot.get("max_bytes"))
        with self._lock:
            self._running[worker_id, incarnation] = running
            if self._watchdog is None and (running.step_timeout_s or running.max_bytes):
                self._watchdog = threading.Thread(
                    target=self._watch_all, name="distcollect-watchdog", daemon=True
                )
                self._watchdog.start()
        watcher = threading.Thread(
            target=self._watch,
            args=(worker_id, incarnation, running),
            name="distcollect-watch",
            daemon=True,
        )
        self._watchers = [thread for thread in self._watchers if thread.is_alive()] + [watcher]
        watcher.start()

    def kill(self, worker_id: int, incarnation: int) -> None:
        """End a worker at once, and all that it started."""
        with self._lock:
            running = self._running.get((worker_id, incarnation))
        if running is not None:
            _kill_group(running.process.pid)

    def terminate(self) -> None:
        """Ask all workers to leave."""
        with self._lock:
            for running in self._running.values():
                running.process.terminate()

    def kill_all(self) -> None:
        """End all workers at once."""
        with self._lock:
            for running in self._running.values():
                _kill_group(running.process.pid)

    def close(self, grace_s: float) -> None:
        """Wait up to ``grace_s`` for all to end by themselves, then end them; reap every one."""
        deadline = time.monotonic() + grace_s
        self._closed.set()
        for watcher in self._watchers:
            watcher.join(max(0.0, deadline - time.monotonic()))
        with self._lock:
            remaining = dict(self._running)
        for (worker_id, _), running in remaining.items():
            log.warning("worker %d did not end within %g s: killing it", worker_id, grace_s)
            _kill_group(running.process.pid)
        for watcher in self._watchers:
            watcher.join(5)
        # Not by closing its pipe: a forked child of this process may hold that open.
        self._guard.kill()
        self._guard.wait(5)
        assert self._guard.stdin is not None
        with contextlib.suppress(OSError):
            self._guard.stdin.close()

    def _watch(self, worker_id: int, incarnation: int, running: _Running) -> None:
        process = running.process
        code = process.wait()
        # What its envs started doesn't always end with it.
        _kill_group(process.pid)
        self._tell_guard(f"-{process.pid}")
        with self._lock:
            del self._running[worker_id, incarnation]
        self._events.exited(
            worker_id, incarnation, End(code, running.vitals.stepped, running.reason)
        )

    def _watch_all(self) -> None:
        """End those that hang in a step, report those that grow."""
        while True:
            with self._lock:
                all_running = dict(self._running)
            limits = [r.step_timeout_s for r in all_running.values() if r.step_timeout_s]
            if self._closed.wait(min([_WATCHDOG_PERIOD_S, *(limit / 4 for limit in limits)])):
                return
            now = time.monotonic()
            for (worker_id, incarnation), running in all_running.items():
                self._watch_step(worker_id, running, now)
                self._watch_memory(worker_id, incarnation, running)

    def _watch_step(self, worker_id: int, running: _Running, now: float) -> None:
        stepped = running.vitals.stepped if running.vitals.busy else -1
        if stepped != running.stepped or stepped == -1:
            running.stepped, running.since = stepped, now
            return
        limit_s = running.step_timeout_s
        if limit_s is not None and now - running.since >= limit_s and not running.reason:
            running.reason = f"no step of its envs was done within {now - running.since:.1f} s"
            log.warning("worker %d: %s; killing it", worker_id, running.reason)
            _kill_group(running.process.pid)

    def _watch_memory(self, worker_id: int, incarnation: int, running: _Running) -> None:
        if running.max_bytes is None:
            return
        num_bytes = _resident_bytes(running.process.pid)
        if num_bytes > running.max_bytes:
            self._events.bloated(worker_id, incarnation, num_bytes)

    def _tell_guard(self, line: str) -> None:
        assert self._guard.stdin is not None
        with self._lock, contextlib.suppress(OSError, ValueError):
            self._guard.stdin.write(line.encode() + b"\n")
            self._guard.stdin.flush()


def _resident_bytes(pid: int) -> int:
    """Memory of a process that is in RAM; 0 once it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * mmap.PAGESIZE
    except OSError:
        return 0


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
