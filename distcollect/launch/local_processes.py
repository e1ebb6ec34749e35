"""Worker processes on this host: started, watched, and ended for certain.

Each worker has a small parent process of its own, its guard (:mod:`.worker_guard`), which ends all
that the worker's envs started when the worker ends, when it is told to, and when the process that
started them has ended, even by a ``kill -9`` while an env holds the worker's interpreter lock.
Guards and workers have sessions of their own, so that a Ctrl-C in the terminal reaches the trainer
alone.

A forked child of the process that started them can't end them.
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

from distcollect.common.forks import Owner
from distcollect.common.process_exit import ProcessExit
from distcollect.common.step_counter import SharedStepCounter
from distcollect.launch import worker_guard
from distcollect.net.messages import WorkerBoot, to_frame

log = logging.getLogger(__name__)

_WATCHDOG_PERIOD_S = 1.0
# Longer than a guard takes to end what its worker started.
_REAP_TIMEOUT_S = 8.0
_GUARD = str(Path(worker_guard.__file__).resolve())

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
        guard: the worker's parent process, which ends as the worker ends.
        boot: what it was started with.
        stepped: frames stepped when that number last changed; -1: it isn't stepping.
        since: when it last changed, in seconds of the monotonic clock.
        reason: why the watchdog has ended it; "" if it hasn't.
    """

    guard: subprocess.Popen[bytes]
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
        self._owner = Owner()

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
            guard = self._start(
                replace(boot, counters_fd=counters.fd, sys_path=tuple(sys.path)), env
            )
        finally:
            counters.close()
        running = _Running(guard, counters, boot)
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
        guard = subprocess.Popen(
            [sys.executable, "-I", "-S", _GUARD, str(self._owner.pid), sys.executable, "-c", _BOOT],
            stdin=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, **env},
            pass_fds=[boot.counters_fd],
        )
        assert guard.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            guard.stdin.write(json.dumps(to_frame(boot)).encode() + b"\n")
            guard.stdin.close()
        return guard

    def kill(self, worker_id: int, incarnation: int) -> None:
        """End a worker at once, and all that it started; do nothing if it has ended."""
        with self._lock:
            running = self._running.get((worker_id, incarnation))
        if running is not None:
            self._kill(running)

    def _kill(self, running: _Running) -> None:
        if self._owner.is_here:
            running.guard.send_signal(worker_guard.KILL)

    def terminate(self) -> None:
        """Ask all workers to leave."""
        if not self._owner.is_here:
            return
        with self._lock:
            for running in self._running.values():
                running.guard.terminate()

    def kill_all(self) -> None:
        """End all workers at once."""
        with self._lock:
            for running in self._running.values():
                self._kill(running)

    def close(self, grace_s: float) -> None:
        """Wait up to ``grace_s`` for all to end by themselves, then kill them; reap every one."""
        if not self._owner.is_here:
            return
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
            self._kill(running)
        for reaper in reapers:
            reaper.join(_REAP_TIMEOUT_S)

    def _reap(self, running: _Running) -> None:
        boot = running.boot
        code = running.guard.wait()
        if code == -worker_guard.KILL:  # the guard had not started the worker yet
            code = -signal.SIGKILL
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
            self._kill(running)

    def _watch_memory(self, running: _Running) -> None:
        boot = running.boot
        if boot.settings.max_bytes is None:
            return
        worker = worker_guard.children_of(running.guard.pid)[:1]
        num_bytes = sum(map(_resident_bytes, worker))
        if num_bytes > boot.settings.max_bytes:
            self._events.memory_exceeded(boot.worker_id, boot.incarnation, num_bytes)


def _resident_bytes(pid: int) -> int:
    """Resident memory of a process; 0 once it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * mmap.PAGESIZE
    except OSError:
        return 0
