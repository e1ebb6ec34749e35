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
from typing import Protocol

from distcollect.common.process_exit import ProcessExit
from distcollect.common.step_counter import STACK_SIGNAL, SharedStepCounter
from distcollect.launch import zygote
from distcollect.launch.progress_watch import ProgressWatch
from distcollect.net.messages import WorkerBoot, to_frame

log = logging.getLogger(__name__)

_WATCHDOG_PERIOD_S = 1.0
# From the signal that has a process write its stack until that is read, and the process ended.
_STACK_S = 0.25

# sys.path is set first: it may be what makes distcollect importable. The cores are set before
# anything starts threads.
_BOOT = """
import json, os, sys
boot = json.loads(sys.stdin.readline())
if boot["cores"]:
    os.sched_setaffinity(0, boot["cores"])
sys.path[:] = boot["sys_path"]
from distcollect.net.messages import WorkerBoot, decode_as
from distcollect.worker.main import main
main(decode_as(WorkerBoot, boot))
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


class _Process(Protocol):
    """A worker process.

    Attributes:
        pid: its process id; None until it is known.
    """

    @property
    def pid(self) -> int | None: ...

    def wait(self) -> int:
        """Wait for its end; its exit code, -N if signal N ended it."""

    def terminate(self) -> None:
        """Send it SIGTERM."""

    def kill(self) -> None:
        """End it and what it has started at once."""


class _OwnProcess:
    """A worker that this process has started itself."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.pid: int | None = process.pid

    def wait(self) -> int:
        code = self._process.wait()
        self.kill()  # what its envs started doesn't always end with it
        return code

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


@dataclass
class _Running:
    """A process, and what its watchdog has seen of it.

    Attributes:
        boot: what it was started with.
        env: environment variables that were added for it.
        watch: whether it makes progress.
        is_killed: it was killed by this process.
        is_overdue: it was asked for its stack, as it made no progress.
        reason: why the watchdog has ended it; "" if it hasn't.
    """

    process: _Process
    counters: SharedStepCounter
    boot: WorkerBoot
    env: Mapping[str, str]
    watch: ProgressWatch
    is_killed: bool = False
    is_overdue: bool = False
    reason: str = ""

    def kill(self) -> None:
        """End it and what it has started at once."""
        self.is_killed = True
        self.process.kill()


class LocalProcesses:
    """The worker processes that this process has started."""

    def __init__(self, events: ProcessEvents) -> None:
        """Report to ``events``."""
        zygote.warm_up()
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
        boot = replace(boot, counters_fd=counters.fd, sys_path=tuple(sys.path))
        process = self._start(boot, env, counters)
        watch = ProgressWatch(boot.settings.step_timeout_s)
        running = _Running(process, counters, boot, env, watch)
        with self._lock:
            self._running[boot.worker_id, boot.incarnation] = running
            if self._watchdog is None:
                self._watchdog = threading.Thread(
                    target=self._watch_all, name="distcollect-watchdog", daemon=True
                )
                self._watchdog.start()
        reaper = threading.Thread(
            target=self._reap, args=(running,), name="distcollect-reaper", daemon=True
        )
        self._reapers = [thread for thread in self._reapers if thread.is_alive()] + [reaper]
        reaper.start()

    def _start(
        self, boot: WorkerBoot, env: Mapping[str, str], counters: SharedStepCounter
    ) -> _Process:
        def forked(pid: int) -> None:
            counters.close()
            self._tell_guard(f"+{pid}")

        try:
            return zygote.fork(boot, env, counters.fd, forked)
        except zygote.Unavailable as error:
            log.debug("worker %d is started by itself: %s", boot.worker_id, error)
            return self._start_alone(boot, env, counters)

    def _start_alone(
        self, boot: WorkerBoot, env: Mapping[str, str], counters: SharedStepCounter
    ) -> _OwnProcess:
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", _BOOT],
                stdin=subprocess.PIPE,
                start_new_session=True,
                env={**os.environ, **env},
                pass_fds=[boot.counters_fd],
            )
        finally:
            counters.close()
        self._tell_guard(f"+{process.pid}")
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(to_frame(boot)).encode() + b"\n")
            process.stdin.close()
        return _OwnProcess(process)

    def kill(self, worker_id: int, incarnation: int) -> None:
        """End a worker at once, and all that it started; do nothing if it has ended."""
        with self._lock:
            running = self._running.get((worker_id, incarnation))
        if running is not None:
            running.kill()

    def terminate(self) -> None:
        """Ask all workers to leave."""
        with self._lock:
            for running in self._running.values():
                running.process.terminate()

    def kill_all(self) -> None:
        """End all workers at once."""
        with self._lock:
            for running in self._running.values():
                running.kill()

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
            running.kill()
        for reaper in reapers:
            reaper.join(5)
        zygote.end_if_unwanted()
        # By a signal: a forked child of this process may hold its pipe open.
        self._guard.kill()
        self._guard.wait(5)
        assert self._guard.stdin is not None
        with contextlib.suppress(OSError):
            self._guard.stdin.close()

    def _reap(self, running: _Running) -> None:
        boot, reason = running.boot, ""
        try:
            code = self._wait(running)
        except OSError as error:
            code, reason = -1, f"it could not be started: {error}"
        if running.process.pid is not None:
            self._tell_guard(f"-{running.process.pid}")
        with self._lock:
            del self._running[boot.worker_id, boot.incarnation]
        process_exit = ProcessExit(code, running.counters.stepped, running.reason or reason)
        self._events.exited(boot.worker_id, boot.incarnation, process_exit)

    def _wait(self, running: _Running) -> int:
        try:
            return running.process.wait()
        except zygote.Unavailable as error:
            log.warning(
                "worker %d starts by itself, which takes longer: %s", running.boot.worker_id, error
            )
        with self._lock:
            if running.is_killed:
                running.counters.close()
                return -signal.SIGKILL
            running.process = self._start_alone(running.boot, running.env, running.counters)
        return running.process.wait()

    def _watch_all(self) -> None:
        """End processes that hang, report those that take too much memory."""
        while True:
            with self._lock:
                all_running = list(self._running.values())
            limits = [limit / 4 for r in all_running if (limit := r.boot.settings.step_timeout_s)]
            limits += [_STACK_S for running in all_running if running.is_overdue]
            if self._closed.wait(min([_WATCHDOG_PERIOD_S, *limits])):
                return
            now = time.monotonic()
            for running in all_running:
                try:
                    self._watch_progress(running, now)
                    self._watch_memory(running)
                except Exception:  # the other processes, and later ones, need the watch
                    log.exception("watching worker %d failed", running.boot.worker_id)

    def _watch_progress(self, running: _Running, now: float) -> None:
        overdue = running.watch.overdue(running.counters.blocks(), now)
        if running.reason:
            return
        if overdue and running.is_overdue:  # by now it has written its stack, if it can
            stack = running.counters.stack()
            running.reason = overdue + (f"; it was in {stack}" if stack else "")
            log.warning("worker %d: %s; killing it", running.boot.worker_id, running.reason)
            running.kill()
        elif overdue and running.process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(running.process.pid, STACK_SIGNAL)
        running.is_overdue = bool(overdue)

    def _watch_memory(self, running: _Running) -> None:
        boot = running.boot
        if boot.settings.max_bytes is None:
            return
        if running.process.pid is None:
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
