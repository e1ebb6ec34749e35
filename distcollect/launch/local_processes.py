"""Worker processes on this host: started, watched, and ended for certain.

Each worker leads a session of its own: ending its process group also ends what its envs started,
and a Ctrl-C in the terminal reaches the trainer alone. A small guard process outlives the process
that started the workers just long enough to end them. This also covers a ``kill -9`` of the
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
from dataclasses import dataclass, replace
from pathlib import Path

from distcollect.common.process_exit import ProcessExit
from distcollect.common.step_counter import SharedStepCounter
from distcollect.launch.run_folder import SECRET_VARIABLE
from distcollect.net.messages import WorkerBoot, to_frame

log = logging.getLogger(__name__)

_WATCHDOG_PERIOD_S = 1.0

# sys.path is set first: it may be what makes distcollect importable. The cores are set before
# anything starts threads.
_BOOT = """
import json, os, sys
boot = json.loads(sys.stdin.readline())
if boot["cores"]:
    os.sched_setaffinity(0, boot["cores"])
sys.path[:] = boot["sys_path"]
from distcollect.worker.main import main
main(boot)
"""

# Reads process groups ("+PGID" to add one, "-PGID" to remove it), and kills them once its parent is
# gone: then the pipe is closed, or (when a forked child of the parent holds the pipe open) it has
# another parent.
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


class ProcessEvents:
    """What is reported about worker processes, on other threads."""

    def exited(self, worker_id: int, incarnation: int, process_exit: ProcessExit) -> None:
        """A process has ended and was reaped."""

    def memory_exceeded(self, worker_id: int, incarnation: int, num_bytes: int) -> None:
        """A process takes more memory than it may; repeated while that is so."""


@dataclass
class _Running:
    """A process, and what its watchdog has seen of it.

    Attributes:
        boot: what it was started with.
        stepped: frames stepped when that number last changed; -1: it isn't stepping.
        since: when it last changed, in seconds of the monotonic clock.
        reason: why the watchdog has ended it; "" if it hasn't.
    """

    process: subprocess.Popen[bytes]
    counters: SharedStepCounter
    boot: WorkerBoot
    stepped: int = -1
    since: float = 0.0
    reason: str = ""


class LocalProcesses:
    """The worker processes that this process has started."""

    def __init__(self, events: ProcessEvents) -> None:
        """Report to ``events``."""
        self._events = events
        # Reentrant: garbage collection under it may finalize a collector, which ends its processes.
        self._lock = threading.RLock()
        self._running: dict[tuple[int, int], _Running] = {}
        self._reapers: list[threading.Thread] = []
        self._closed = threading.Event()
        self._watchdog: threading.Thread | None = None
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _GUARD],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def spawn(self, boot: WorkerBoot, env: Mapping[str, str]) -> None:
        """Start a worker process.

        Args:
            boot: what it reads first; its ``counters_fd`` and ``sys_path`` are filled in here.
            env: environment variables to add to this process's own.

        Raises:
            OSError: the system can't start it.
        """
        counters = SharedStepCounter()
        try:
            process = self._start(
                replace(boot, counters_fd=counters.fd, sys_path=tuple(sys.path)), env
            )
        finally:
            counters.close()
        running = _Running(process, counters, boot)
        with self._lock:
            self._running[boot.worker_id, boot.incarnation] = running
            if self._watchdog is None and (boot.settings.step_timeout_s or boot.settings.max_bytes):
                self._watchdog = threading.Thread(
                    target=self._watch_all, name="distcollect-watchdog", daemon=True
                )
                self._watchdog.start()
        reaper = threading.Thread(
            target=self._reap, args=(running,), name="distcollect-reaper", daemon=True
        )
        self._reapers = [thread for thread in self._reapers if thread.is_alive()] + [reaper]
        reaper.start()

    def _start(self, boot: WorkerBoot, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        # What the user's envs start has no use for the token.
        inherited = {name: v for name, v in os.environ.items() if name != SECRET_VARIABLE}
        process = subprocess.Popen(
            [sys.executable, "-c", _BOOT],
            stdin=subprocess.PIPE,
            start_new_session=True,
            env={**inherited, **env},
            pass_fds=[boot.counters_fd],
        )
        self._tell_guard(f"+{process.pid}")
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(to_frame(boot)).encode() + b"\n")
            process.stdin.close()
        return process

    def kill(self, worker_id: int, incarnation: int) -> None:
        """End a worker at once, and all that it started; do nothing if it has ended."""
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
        """Wait up to ``grace_s`` for all to end by themselves, then kill them; reap every one."""
        deadline = time.monotonic() + grace_s
        self._closed.set()
        # Not this thread, on which a collector may be finalized.
        reapers = [r for r in self._reapers if r is not threading.current_thread()]
        for reaper in reapers:
            reaper.join(max(0.0, deadline - time.monotonic()))
        with self._lock:
            remaining = dict(self._running)
        for (worker_id, _), running in remaining.items():
            log.warning("worker %d did not end within %g s: killing it", worker_id, grace_s)
            _kill_group(running.process.pid)
        for reaper in reapers:
            reaper.join(5)
        # By a signal: a forked child of this process may hold its pipe open.
        self._guard.kill()
        self._guard.wait(5)
        assert self._guard.stdin is not None
        with contextlib.suppress(OSError):
            self._guard.stdin.close()

    def _reap(self, running: _Running) -> None:
        boot, process = running.boot, running.process
        code = process.wait()
        # What its envs started doesn't always end with it.
        _kill_group(process.pid)
        self._tell_guard(f"-{process.pid}")
        with self._lock:
            del self._running[boot.worker_id, boot.incarnation]
        process_exit = ProcessExit(code, running.counters.stepped, running.reason)
        self._events.exited(boot.worker_id, boot.incarnation, process_exit)

    def _watch_all(self) -> None:
        """End processes that hang in a step, report those that take too much memory."""
        while True:
            with self._lock:
                all_running = list(self._running.values())
            limits = [limit / 4 for r in all_running if (limit := r.boot.settings.step_timeout_s)]
            if self._closed.wait(min([_WATCHDOG_PERIOD_S, *limits])):
                return
            now = time.monotonic()
            for running in all_running:
                self._watch_steps(running, now)
                self._watch_memory(running)

    def _watch_steps(self, running: _Running, now: float) -> None:
        stepped = running.counters.stepped if running.counters.busy else -1
        if stepped != running.stepped or stepped == -1:
            running.stepped, running.since = stepped, now
            return
        limit_s = running.boot.settings.step_timeout_s
        if limit_s is not None and now - running.since >= limit_s and not running.reason:
            running.reason = f"its envs finished no step within {now - running.since:.1f} s"
            log.warning("worker %d: %s; killing it", running.boot.worker_id, running.reason)
            _kill_group(running.process.pid)

    def _watch_memory(self, running: _Running) -> None:
        boot = running.boot
        if boot.settings.max_bytes is None:
            return
        num_bytes = _resident_bytes(running.process.pid)
        if num_bytes > boot.settings.max_bytes:
            self._events.memory_exceeded(boot.worker_id, boot.incarnation, num_bytes)

    def _tell_guard(self, line: str) -> None:
        assert self._guard.stdin is not None
        with self._lock, contextlib.suppress(OSError, ValueError):
            self._guard.stdin.write(line.encode() + b"\n")
            self._guard.stdin.flush()


def _resident_bytes(pid: int) -> int:
    """Resident memory of a process; 0 once it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * mmap.PAGESIZE
    except OSError:
        return 0


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
