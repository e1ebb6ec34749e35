"""The parent of one worker process: ends everything that the worker started.

The guard starts the worker in a session of its own and ends as the worker ends: with its exit code,
or by the same signal. First it ends all that the worker has started, also processes in other
sessions: the kernel makes the guard the parent of every descendant whose own parent has ended.

A zygote calls :func:`guard` in a fork.

What it does on which signal:

==============  ===================================================
SIGTERM         sends SIGTERM to the worker
:data:`KILL`    kills the worker and all that it started
:data:`CHECK`   the same, if the parent of this process has ended.
                The kernel sends it when that may be so
==============  ===================================================

All others wait. The worker itself ignores what terminals and batch systems send to every process of
a job: the trainer decides what follows.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path
from typing import NoReturn

# No program sends these by accident.
KILL = signal.SIGRTMIN + 1
CHECK = signal.SIGRTMIN + 2

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_SIGNALS = {signal.SIGCHLD, signal.SIGTERM, KILL, CHECK}
_IGNORED_BY_WORKERS = (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# CHECK comes at once; this is for kernels that don't send it.
_CHECK_PERIOD_S = 5.0
# A process that the kernel can't end now, or another user's, is not waited for any longer.
_END_TIMEOUT_S = 5.0
_AGAIN_S = 0.1
_TRACKER_S = 2.0


def guard(parent: int) -> None:
    """Fork: return in the child, which is the worker; guard it in this process.

    Args:
        parent: the process that started this one. All ends with it.
    """
    libc = ctypes.CDLL(None)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    # If the trainer ignores it, so would this process, and could not wait for its children.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    libc.prctl(_PR_SET_PDEATHSIG, int(CHECK), 0, 0, 0)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    guard_pid = os.getpid()
    worker = os.fork()
    if worker == 0:
        os.setsid()
        libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)  # if the guard is killed
        if os.getppid() != guard_pid:  # it was, before the kernel knew
            os._exit(1)
        for number in _IGNORED_BY_WORKERS:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return
    try:
        _guard(worker, parent)
    finally:
        os._exit(1)


def _guard(worker: int, parent: int) -> NoReturn:
    os.closerange(3, 1024)  # the worker alone holds what it inherits
    name_process("dc-guard")
    status = _wait(worker, parent)
    if status is None:  # the kernel could not end it yet
        _exit_by(signal.SIGKILL)
    if os.WIFSIGNALED(status):
        _exit_by(os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


def _wait(worker: int, parent: int) -> int | None:
    """Wait until the worker has ended or is to be ended, end the rest; its status, if it ends."""
    while True:
        if os.getppid() != parent:
            return _kill_all(worker)
        received = signal.sigtimedwait(_SIGNALS, _CHECK_PERIOD_S)
        number = None if received is None else received.si_signo
        if number == signal.SIGTERM:
            os.kill(worker, signal.SIGTERM)
        elif number == KILL:
            # The status of a worker that was ending by itself says why it ended.
            return _kill_all(worker)
        elif number == signal.SIGCHLD:
            # Others are reaped too: this process is the parent of what lost its own.
            for pid, status in ended():
                if pid == worker:
                    _kill_all(worker)
                    return status


def ended() -> list[tuple[int, int]]:
    """The children that have ended, with their statuses."""
    found = []
    with contextlib.suppress(ChildProcessError):
        while (child := os.waitpid(-1, os.WNOHANG))[0]:
            found.append(child)
    return found


def _kill_all(worker: int) -> int | None:
    """End the worker, its process group, and every other descendant, as far as possible.

    Returns:
        The worker's status, if it ends here.
    """
    status = None
    begin = time.monotonic()
    while (took_s := time.monotonic() - begin) < _END_TIMEOUT_S:
        found = _descendants(worker)
        if not found:
            break
        # Python's resource trackers end by themselves once all that use what they track have ended,
        # and free it: named semaphores and shared memory, which would stay otherwise.
        others = [pid for pid in found if not _is_resource_tracker(pid)]
        for pid in others or (found if took_s > _TRACKER_S else []):
            with contextlib.suppress(OSError):  # a program of another user
                os.kill(pid, signal.SIGKILL)
        # The children of those that end now become children of this process.
        signal.sigtimedwait({signal.SIGCHLD}, _AGAIN_S)
        status = dict(ended()).get(worker, status)
    return status


def name_process(name: str) -> None:
    """Have ``ps -e`` and ``top`` show this process by a name of at most 15 characters."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name)


def children_of(pid: int) -> list[int]:
    """The ids of a process's children, oldest first; zombies count."""
    return [child for child, parent, _ in _processes() if parent == pid]


def _descendants(worker: int) -> list[int]:
    """This process's children, and what else is in the worker's process group."""
    own = os.getpid()
    return [pid for pid, parent, group in _processes() if own == parent or group == worker]


def _processes() -> list[tuple[int, int, int]]:
    """The id of each process, its parent's, and its process group's; the oldest first."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # After the command's name, in parentheses: the state, the parent, ..., the start.
            fields = stat.read_text().rpartition(")")[2].split()
            about = int(stat.parent.name), int(fields[1]), int(fields[2])
            found.append((int(fields[19]), about))
    return [about for _, about in sorted(found)]


def _is_resource_tracker(pid: int) -> bool:
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        return b"multiprocessing.resource_tracker import main" in command
    return False


def _exit_by(number: int) -> NoReturn:
    """End this process by a signal, without a core file."""
    import resource  # noqa: PLC0415 - few workers end like this

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # SIGKILL has no handler
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    os._exit(128 + number)
