"""Worker processes on this host: started, watched, and ended for certain.

Each worker has a parent process of its own, its guard (:mod:`distcollect.common.worker_guard`),
which ends all that the worker's envs started when the worker ends, when it is told to, and when the
process that started them has ended, even by a ``kill -9`` while an env holds the worker's
interpreter lock. Guards and workers have sessions of their own, so that a Ctrl-C in the terminal
reaches the trainer alone.

Guard and worker are forked from the zygote (:mod:`.zygote`). A forked child of the process that
started them can't end them.
"""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeAlias

from distcollect.common import worker_guard, worker_prints
from distcollect.common.forks import Owner
from distcollect.common.process_exit import ProcessExit
from distcollect.common.step_counter import (
    LIMIT_MS,
    NUM_TASKS,
    STACK_SIGNAL,
    TASK,
    SharedStepCounter,
    Task,
)
from distcollect.errors import is_server
from distcollect.launch import zygote
from distcollect.launch.cpu_placement import CpuPlacement, Host
from distcollect.launch.zygote import Inheritance
from distcollect.net.messages import Exited, MemoryExceeded, Spawn, TrainerAddress, WorkerBoot

log = logging.getLogger(__name__)

_WATCHDOG_PERIOD_S = 1.0
# Longer than a guard takes to end what its worker started.
_REAP_TIMEOUT_S = 8.0
# From the signal that has a process write its stack until that is read, and the process ended.
_STACK_S = 0.25
# The same for a process that starts; the trainer ends it.
_STARTING_S = 2.0
_PRINTS_TIMEOUT_S = 1.0

Block: TypeAlias = tuple[int, ...]
ProcessReport: TypeAlias = Exited | MemoryExceeded

_TEXTS = {
    Task.COLLECT: "its envs finished no step within {:.1f} s",
    Task.EVALUATE: "it made no progress with an evaluation within {:.1f} s",
    Task.CALL: "a method of its envs that was called did not end within {:.1f} s",
    Task.SET_UP: "it did not take a seed or a state within {:.1f} s",
    Task.HOOK: "a pre_collect_hook or post_collect_hook did not end within {:.1f} s",
    Task.SERVE: "its policy chose no actions within {:.1f} s",
}


@dataclass
class ProgressWatch:
    """Whether one process makes progress.

    Each step, and each begin and end of a task, is progress. A process that is idle is not watched.
    When it starts, and when its workers stop, other deadlines hold.

    Attributes:
        step_timeout_s: how long a step may take; None: as long as it likes.
    """

    step_timeout_s: float | None
    _seen: tuple[Block, ...] = ()
    _since: float = field(default=0.0)

    def overdue(self, blocks: tuple[Block, ...], now: float) -> str:
        """Return what the process has been doing for too long, in words; "" if nothing.

        Args:
            blocks: what :meth:`.SharedStepCounter.blocks` gives.
            now: seconds of the monotonic clock.
        """
        busy = [block for block in blocks if block[TASK] != Task.IDLE]
        if blocks != self._seen or not busy:
            self._seen, self._since = blocks, now
            return ""
        took_s = now - self._since
        # The last block that is busy says most: an evaluation steps envs of its own.
        for block in reversed(busy):
            if took_s >= self._limit_s(block):
                where = ", in an evaluation" if block is blocks[-1] else ""
                return _TEXTS[Task(block[TASK])].format(took_s) + where
        return ""

    def _limit_s(self, block: Block) -> float:
        step_s = math.inf if self.step_timeout_s is None else self.step_timeout_s
        own_s = block[LIMIT_MS] / 1000
        # The deadline of an evaluation is for its episodes. Its envs may take longer to make.
        is_call = block[TASK] == Task.CALL
        return own_s if is_call else max(own_s, step_s)


@dataclass
class _Running:
    """A process, and what its watchdog has seen of it.

    Attributes:
        wanted: what the trainer wants.
        watch: whether it makes progress.
        asked_at: seconds of the monotonic clock from which on it is asked for its stack, once, if
            it is not ready.
        is_overdue: it was asked for its stack, as it made no progress.
        reason: why the watchdog has ended it; "" if it hasn't.
    """

    process: zygote.WorkerProcess
    counters: SharedStepCounter
    wanted: Spawn
    watch: ProgressWatch
    asked_at: float
    is_overdue: bool = False
    reason: str = ""

    @property
    def is_starting(self) -> bool:
        """Whether it has done nothing yet."""
        return not any(block[NUM_TASKS] for block in self.counters.blocks())

    def ask_for_stack(self) -> None:
        """Have it write its stack, if it can."""
        if (pid := self.worker_pid) is not None:
            with contextlib.suppress(OSError):  # it ended, or this process gave up its user
                os.kill(pid, STACK_SIGNAL)

    def place(self) -> str:
        """Say where it was when it wrote its stack; "" if it didn't."""
        stack = self.counters.stack()
        return f"it was in {stack}" if stack else ""

    @property
    def worker_pid(self) -> int | None:
        """The process id of the worker itself; None if it doesn't run."""
        guard = self.process.pid
        return None if guard is None else next(iter(worker_guard.children_of(guard)), None)


class LocalProcesses:
    """The worker processes that this process has started."""

    def __init__(self, report: Callable[[ProcessReport], object]) -> None:
        """``report`` is called on other threads: for each process that has ended and was reaped.

        Also while one takes more memory than it may, again and again.
        """
        self._inheritance = Inheritance.now()  # also for replacements
        zygote.warm_up(self._inheritance, self)
        self._report = report
        # Reentrant: garbage collection under it may finalize a collector, which ends its processes.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._running: dict[tuple[int, int], _Running] = {}
        self._closed = threading.Event()
        self._are_leaving = False
        self._readers: list[threading.Thread] = []  # of what workers print
        self._watchdog: threading.Thread | None = None
        self._owner = Owner()
        self._host_cores = Host.inspect().usable

    def spawn(
        self,
        wanted: Spawn,
        trainer: TrainerAddress,
        placement: CpuPlacement,
        control: socket.socket | None = None,
    ) -> None:
        """Start the worker process that a trainer wants; report it as ended if that fails.

        Args:
            wanted: what the trainer wants.
            trainer: where the process joins.
            placement: where it runs.
            control: its end of a connection with the trainer, to be closed here; None: it connects.
        """
        cores = placement.cores or os.sched_getaffinity(0)
        self._readers[:] = [reader for reader in self._readers if reader.is_alive()]
        try:
            with (
                control or contextlib.nullcontext(),
                contextlib.closing(SharedStepCounter()) as counters,
            ):
                boot = WorkerBoot(
                    wanted,
                    trainer,
                    num_threads=placement.num_threads,
                    counters_fd=counters.fd,
                    control_fd=-1 if control is None else control.fileno(),
                    host_cores=self._host_cores,
                    sys_path=self._inheritance.sys_path,
                    authkey=multiprocessing.current_process().authkey.hex(),
                )
                with worker_prints.output_streams(wanted.name, self._readers) as streams:
                    process = zygote.start(boot, self._inheritance, cores, streams)
        except OSError as error:
            process_exit = ProcessExit(-1, 0, f"it could not be started: {error}")
            self._report(Exited(wanted.worker_id, wanted.incarnation, process_exit))
            return
        key, start_s = (wanted.worker_id, wanted.incarnation), wanted.settings.start_timeout_s
        asked_at = time.monotonic() + start_s - min(_STARTING_S, start_s / 4)
        watch = ProgressWatch(wanted.settings.step_timeout_s)
        with self._lock:
            self._running[key] = _Running(process, counters, wanted, watch, asked_at)
            if self._watchdog is None:
                self._watchdog = threading.Thread(
                    target=self._watch_all, name="distcollect-watchdog", daemon=True
                )
                self._watchdog.start()
        # By its key: a cycle would keep the run's memory until the next garbage collection.
        process.end.add_done_callback(partial(self._ended, key))

    def kill(self, worker_id: int, incarnation: int) -> None:
        """End a worker at once, and all that it started; do nothing if it has ended."""
        running = self._running.get((worker_id, incarnation))
        if running is not None and self._owner.is_here:
            running.process.send_signal(worker_guard.KILL)

    def terminate(self) -> None:
        """Ask all workers to leave; a server ends after them."""
        self._are_leaving = True
        with self._lock:
            for (worker_id, _), running in self._running.items():
                if not is_server(worker_id):
                    running.process.send_signal(signal.SIGTERM)

    def close(self, grace_s: float) -> None:
        """Wait up to ``grace_s`` for all to end by themselves, then kill them; reap every one."""
        if not self._owner.is_here:
            return
        self._closed.set()

        def is_awaited(process: tuple[int, int]) -> bool:
            return not (self._are_leaving and is_server(process[0]))

        for running in self._still_running(grace_s, is_awaited):
            if grace_s and is_awaited((running.wanted.worker_id, 0)):
                log.warning("%s did not end within %g s: killing it", running.wanted.name, grace_s)
            self.kill(running.wanted.worker_id, running.wanted.incarnation)
        for running in self._still_running(_REAP_TIMEOUT_S):
            log.warning("the guard of %s hangs, or the zygote: killing both", running.wanted.name)
            running.process.kill()
        self._still_running(_REAP_TIMEOUT_S)
        deadline = time.monotonic() + _PRINTS_TIMEOUT_S
        for reader in self._readers:
            reader.join(max(0.0, deadline - time.monotonic()))
        zygote.end_if_unwanted(self)

    def _still_running(
        self, timeout_s: float, is_awaited: Callable[[tuple[int, int]], bool] = bool
    ) -> list[_Running]:
        """Wait up to ``timeout_s`` until those awaited have ended; all that have not."""
        with self._lock:
            self._changed.wait_for(lambda: not any(map(is_awaited, self._running)), timeout_s)
            return list(self._running.values())

    def _ended(self, key: tuple[int, int], end: Future[tuple[int, str]]) -> None:
        """Report the end of a process. Called without the lock, on the zygote's thread or any."""
        with self._lock:
            running = self._running[key]
        code, reason = end.result()
        if code == -worker_guard.KILL:  # the guard had not started the worker yet
            code = -signal.SIGKILL
        if running.is_starting:
            reason = reason or running.place()
        process_exit = ProcessExit(code, running.counters.stepped, running.reason or reason)
        self._report(Exited(*key, process_exit))
        with self._lock:
            del self._running[key]
            self._changed.notify_all()

    def _watch_all(self) -> None:
        """End processes that hang, report those that take too much memory."""
        while True:
            with self._lock:
                all_running = list(self._running.values())
            limits = [limit / 4 for r in all_running if (limit := r.wanted.settings.step_timeout_s)]
            limits += [max(_STACK_S, r.asked_at - time.monotonic()) for r in all_running]
            limits += [_STACK_S for running in all_running if running.is_overdue]
            if self._closed.wait(min([_WATCHDOG_PERIOD_S, *limits])):
                return
            now = time.monotonic()
            for running in all_running:
                try:
                    self._watch_progress(running, now)
                    self._watch_memory(running)
                except Exception:  # the other processes, and later ones, need the watch
                    log.exception("watching %s failed", running.wanted.name)

    def _watch_progress(self, running: _Running, now: float) -> None:
        overdue = running.watch.overdue(running.counters.blocks(), now)
        if running.reason:
            return
        if overdue and running.is_overdue:  # by now it has written its stack, if it can
            running.reason = "; ".join(filter(None, (overdue, running.place())))
            log.warning("%s: %s; killing it", running.wanted.name, running.reason)
            self.kill(running.wanted.worker_id, running.wanted.incarnation)
        elif overdue:
            running.ask_for_stack()
        elif now >= running.asked_at:
            running.asked_at = math.inf
            if running.is_starting:  # the trainer will end it soon
                running.ask_for_stack()
        running.is_overdue = bool(overdue)

    def _watch_memory(self, running: _Running) -> None:
        wanted = running.wanted
        if wanted.settings.max_bytes is None:
            return
        pid = running.worker_pid
        num_bytes = 0 if pid is None else _resident_bytes(pid)
        if num_bytes > wanted.settings.max_bytes:
            self._report(MemoryExceeded(wanted.worker_id, wanted.incarnation, num_bytes))


def _resident_bytes(pid: int) -> int:
    """Resident memory of a process; 0 once it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * mmap.PAGESIZE
    except OSError:
        return 0
