"""The zygote: a process that has imported what workers need, and starts each of them by a fork.

A fork takes milliseconds and shares the memory of all that was imported; importing torch takes
seconds of CPU and 150 MB in each worker. The process has a single thread and never computes
anything, so nothing is lost by forking: no lock is held, no pool of threads has started, no GPU is
in use. :class:`distcollect.launch.zygote.Zygote` is its other end.

Where a fork would not do, the fork becomes a new Python, which imports all by itself.

What both say is pickled, and goes over a pair of sockets that nobody else can reach. A request is a
worker's number and a signal for that worker's guard. If descriptors come along, it is to start
that worker, as a new Python if the signal is not 0; without them, and without a signal, to end with
the last worker. An answer is a worker's number, whether that is the end, the guard's process id or,
at the end, the exit code, and words: why it is a new Python, or why it could not be started.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import multiprocessing
import os
import pickle
import random
import selectors
import signal
import socket
import stat
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from distcollect.common import worker_guard
from distcollect.net.messages import WorkerBoot

# What a worker would import later, after it was forked.
_PRELOADED = (
    "cloudpickle",
    "gymnasium",
    "gymnasium.vector",
    "distcollect.engine.build",
    "distcollect.envs.make",
    "distcollect.worker.main",
    "encodings.idna",  # to look up a host's address
)
_MOST_FDS = 5  # of its start, stdout and stderr, its step counter, and maybe its connection
_NEW_PYTHON = """
import sys
sys.path[:] = {path!a}
from distcollect.worker.zygote import begin_new_python
boot = begin_new_python({start_fd}, {fds!r}, {mask!r})
from distcollect.worker.main import main
main(boot)
"""
_LONGEST_REQUEST = 4096
_LONGEST_WAKEUP = 4096
_IOLBF = 1  # of C's stdio.h


def serve(fd: int, imported: Sequence[str], mask: Sequence[int]) -> WorkerBoot:
    """Fork workers until the process that started this one ends or needs no more.

    Args:
        fd: descriptor of the socket by which they are requested.
        imported: modules that the trainer has imported and its envs may need.
        mask: signals that are blocked in workers. Here all are: batch systems signal every process
            of a job, and no signal may end what all workers depend on.

    Returns:
        In each worker, what it starts with. In the zygote it doesn't return.
    """
    # If the trainer ignores it, so would this process, and could not wait for its children.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    worker_guard.name_process("dc-zygote")
    for name in _PRELOADED:
        importlib.import_module(name)
    for name in imported:
        with contextlib.suppress(Exception):  # the trainer may have it from a place of its own
            importlib.import_module(name)
    # Importing TorchRL makes "spawn" the default: a worker whose envs have processes of their own
    # and use nothing of TorchRL would start these as slowly as itself.
    multiprocessing.set_start_method(None, force=True)
    unforkable = _loses_gpus()
    _warm_up()
    gc.collect()
    gc.freeze()  # a collection in a worker then doesn't write to the shared pages
    fds, is_new_python = _Zygote(socket.socket(fileno=fd), unforkable).run()
    gc.enable()
    return _become_worker(fds, mask, is_new_python)


def _warm_up() -> None:
    """Do what takes long the first time only, and starts no thread, in place of each worker."""
    torch.seed()  # for GPUs to come, torch keeps the traceback of this call, with its source lines
    pickle.loads(pickle.dumps(torch.nn.Parameter(torch.zeros(1))))


class _Zygote:
    def __init__(self, sock: socket.socket, unforkable: str) -> None:
        """Serve ``sock``; ``unforkable``: why no worker can be a mere fork, "" if they can."""
        self._sock = sock
        self._unforkable = unforkable
        self._pid = os.getpid()
        self._retired = False
        self._workers: dict[int, int] = {}  # the request's number, by the guard's process id
        self._selector = selectors.DefaultSelector()
        self._selector.register(sock, selectors.EVENT_READ, self._receive)
        self._ends, self._end = socket.socketpair()  # it can be read when a child has ended
        self._ends.setblocking(False)
        self._end.setblocking(False)
        self._selector.register(self._ends, selectors.EVENT_READ, self._reap)

    def run(self) -> tuple[list[int], bool]:
        """Do what is requested, until the parent needs no more; then the process ends.

        Returns:
            In each worker, the descriptors that came with the request for it, and whether it is to
            be a new Python.
        """
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._end.fileno(), warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        while self._workers or not self._retired:
            for key, _ in self._selector.select():
                try:
                    worker: tuple[list[int], bool] | None = key.data()
                    if worker is not None:
                        return worker
                except Exception:  # noqa: BLE001 - it concerns one worker, and would end all
                    traceback.print_exc()
                    if os.getpid() != self._pid:
                        os._exit(1)
        os._exit(0)

    def _receive(self) -> tuple[list[int], bool] | None:
        try:
            request, fds, _, _ = socket.recv_fds(self._sock, _LONGEST_REQUEST, _MOST_FDS)
        except OSError:
            request, fds = b"", []
        if not request:
            os._exit(0)  # the guards see that, and end their workers
        number, signal_number = pickle.loads(request)
        if fds:
            return self._start(number, fds, bool(signal_number))
        if not signal_number:
            self._retired = True
        for pid in [pid for pid, worker in self._workers.items() if worker == number]:
            os.kill(pid, signal_number)  # it was not reaped yet
        return None

    def _start(
        self, number: int, fds: list[int], is_new_python: bool
    ) -> tuple[list[int], bool] | None:
        """Fork a worker; return what :meth:`run` does there, None in this process."""
        why = "" if is_new_python else self._unforkable or _why_not()
        try:
            pid = os.fork()
        except OSError as error:
            self._answer(number, True, -1, f"it could not be started: {error}")
        else:
            if pid == 0:
                self._leave()
                return fds, is_new_python or bool(why)
            self._workers[pid] = number
            self._answer(number, False, pid, why)
        for fd in fds:
            os.close(fd)
        return None

    def _leave(self) -> None:
        """In a fork: guard a worker; in the worker, close what belongs to the zygote."""
        signal.set_wakeup_fd(-1)
        os.setsid()
        worker_guard.guard(self._pid)
        self._selector.close()
        for sock in (self._sock, self._ends, self._end):
            sock.close()

    def _reap(self) -> None:
        self._ends.recv(_LONGEST_WAKEUP)
        for pid, status in worker_guard.ended():
            number = self._workers.pop(pid, None)  # None: what was imported has started it
            if number is not None:
                self._answer(number, True, os.waitstatus_to_exitcode(status), "")

    def _answer(self, *answer: int | str) -> None:
        with contextlib.suppress(OSError):  # the parent is gone, which the loop sees next
            self._sock.send(pickle.dumps(answer))


def _loses_gpus() -> str:
    """Return why a fork of this process could not use a GPU, in words; "" if it can.

    Torch knows in the fork only. Where torch is built without CUDA there is nothing to lose.
    """
    if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        return ""
    pid = os.fork()
    if pid == 0:
        is_lost = getattr(torch.cuda, "_is_in_bad_fork", None)  # there is no public way
        os._exit(int(is_lost is not None and is_lost()))
    _, status = os.waitpid(pid, 0)
    return "what it imported has used CUDA, and a fork could not" if status else ""


def _why_not() -> str:
    """Return why this process can't be forked, in words; "" if it can."""
    tasks = Path("/proc/self/task")
    threads = [path for path in tasks.iterdir() if int(path.name) != os.getpid()]
    if not threads:
        return ""
    names = ", ".join(sorted({(path / "comm").read_text().strip() for path in threads}))
    return f"what it imported has started {len(threads)} thread(s), named {names}"


def _become_worker(fds: list[int], mask: Sequence[int], is_new_python: bool) -> WorkerBoot:
    """Make a fork of the zygote what a process of its own would have been."""
    start_fd, stdout_fd, stderr_fd, *own_fds = fds
    boot, environ, folder, cores = _read(start_fd)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(stdout_fd, 1)
    os.dup2(stderr_fd, 2)
    os.close(stdout_fd)
    os.close(stderr_fd)
    with contextlib.suppress(OSError):  # the folder is gone: that would not keep it from starting
        os.chdir(folder)
    os.sched_setaffinity(0, cores)
    if is_new_python:
        for fd in (start_fd, *own_fds):
            os.set_inheritable(fd, True)
        code = _NEW_PYTHON.format(
            path=list(boot.sys_path), start_fd=start_fd, fds=own_fds, mask=list(mask)
        )
        os.execve(sys.executable, [*sys.orig_argv[:-1], code], environ)  # noqa: S606
    os.close(start_fd)
    _buffer_lines()
    os.environ.clear()
    os.environ.update(environ)
    sys.path[:] = boot.sys_path
    importlib.invalidate_caches()  # of folders that had other modules when the zygote imported
    random.seed()
    np.random.seed()  # noqa: NPY002 - the state that envs may use
    torch.seed()
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return _with_fds(boot, *own_fds)


def begin_new_python(start_fd: int, fds: Sequence[int], mask: Sequence[int]) -> WorkerBoot:
    """Return what a worker starts with that is a new Python; ``mask``: see :func:`serve`."""
    boot, *_ = _read(start_fd)
    os.close(start_fd)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    _buffer_lines()
    return _with_fds(boot, *fds)


def _with_fds(boot: WorkerBoot, counters_fd: int, control_fd: int = -1) -> WorkerBoot:
    return replace(boot, counters_fd=counters_fd, control_fd=control_fd)


def _buffer_lines() -> None:
    """Have each line of stdout leave at once, unless it goes to a file; C's as well as Python's."""
    at_once = os.isatty(1) or stat.S_ISFIFO(os.fstat(1).st_mode)
    stdout: Any = sys.stdout
    stdout.reconfigure(line_buffering=at_once)
    if at_once:
        libc = ctypes.CDLL(None)
        libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, _IOLBF, 0)


def _read(start_fd: int) -> tuple[WorkerBoot, dict[str, str], str, Sequence[int]]:
    """Read a worker's start: the boot, environment variables, working folder and cores."""
    os.lseek(start_fd, 0, os.SEEK_SET)
    with open(start_fd, "rb", closefd=False) as file:
        start: tuple[WorkerBoot, dict[str, str], str, Sequence[int]] = pickle.load(file)
    return start
