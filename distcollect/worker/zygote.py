"""The zygote: a process that has imported what workers need, and forks each of them.

A fork takes milliseconds and shares the memory of all that was imported; importing torch takes
seconds of CPU and 150 MB in each worker. The process has a single thread and never computes
anything, so nothing is lost by forking: no lock is held, no pool of threads has started, no GPU is
in use. :class:`distcollect.launch.zygote.Zygote` is its other end.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import os
import pickle
import random
import selectors
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from distcollect.common import worker_guard
from distcollect.net.messages import WorkerBoot
from distcollect.net.zygote_messages import (
    Child,
    Ended,
    Fork,
    Forked,
    Retire,
    Signal,
    Unforkable,
    receive,
    send,
)

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
_NUM_FDS = 4


class _Forked(BaseException):
    """Leaves the zygote's loop in a child."""

    def __init__(self, fds: list[int]) -> None:
        self.fds = fds


@dataclass
class _Worker:
    """A worker, by its guard's process id and a descriptor of that process."""

    number: int
    pid: int
    pidfd: int


def serve(fd: int, imported: Sequence[str]) -> WorkerBoot:
    """Fork workers until the process that started this one ends or needs no more.

    Args:
        fd: descriptor of the socket by which they are requested.
        imported: modules that the trainer has imported and its envs may need.

    Returns:
        In each worker, what it starts with. In the zygote it doesn't return.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in (*_PRELOADED, *imported):
        importlib.import_module(name)
    # Importing TorchRL makes "spawn" the default: a worker whose envs have processes of their own
    # and use nothing of TorchRL would start these as slowly as itself.
    multiprocessing.set_start_method(None, force=True)
    unforkable = _loses_gpus()
    _warm_up()
    gc.collect()
    gc.freeze()  # a collection in a worker then doesn't write to the shared pages
    zygote = _Zygote(socket.socket(fileno=fd), unforkable)
    try:
        zygote.run()
    except _Forked as forked:
        fds = forked.fds
    gc.enable()
    return _become_worker(fds)


def _warm_up() -> None:
    """Do what takes long the first time only, and starts no thread, in place of each worker."""
    torch.seed()  # for GPUs to come, torch keeps the traceback of this call, with its source lines
    pickle.loads(pickle.dumps(torch.nn.Parameter(torch.zeros(1))))


class _Zygote:
    def __init__(self, sock: socket.socket, unforkable: str) -> None:
        """Serve ``sock``; ``unforkable``: why no worker can be forked, "" if they can."""
        self._sock = sock
        self._unforkable = unforkable
        self._pid = os.getpid()
        self._retired = False
        self._workers: dict[int, _Worker] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(sock, selectors.EVENT_READ, self._receive)

    def run(self) -> None:
        """Do what is requested, until the parent needs no more."""
        while self._workers or not self._retired:
            for key, _ in self._selector.select():
                key.data()
        os._exit(0)

    def _receive(self) -> None:
        try:
            message, fds = receive(self._sock, _NUM_FDS)
        except OSError:
            message, fds = None, []
        if message is None:
            os._exit(0)  # the guards see that, and end their workers
        elif isinstance(message, Fork):
            self._fork(message, fds)
        elif isinstance(message, Signal):
            worker = self._workers.get(message.number)
            if worker is not None:
                os.kill(worker.pid, message.signal)  # it was not reaped yet
        elif isinstance(message, Retire):
            self._retired = True

    def _fork(self, request: Fork, fds: list[int]) -> None:
        number = request.number
        if reason := self._unforkable or _why_not():
            self._answer(Unforkable(number, reason))
        else:
            try:
                pid = os.fork()
            except OSError as error:
                self._answer(Unforkable(number, f"fork: {error}"))
            else:
                if pid == 0:
                    self._leave()
                    raise _Forked(fds)
                worker = _Worker(number, pid, os.pidfd_open(pid))
                self._workers[number] = worker
                self._selector.register(
                    worker.pidfd, selectors.EVENT_READ, lambda: self._reap(worker)
                )
                self._answer(Forked(number, pid))
        for fd in fds:
            os.close(fd)

    def _leave(self) -> None:
        """In a fork: guard a worker; in the worker, close what belongs to the zygote."""
        os.setsid()
        worker_guard.guard(self._pid)
        self._selector.close()
        self._sock.close()
        for worker in self._workers.values():
            os.close(worker.pidfd)

    def _reap(self, worker: _Worker) -> None:
        _, status = os.waitpid(worker.pid, 0)
        self._selector.unregister(worker.pidfd)
        os.close(worker.pidfd)
        del self._workers[worker.number]
        self._answer(Ended(worker.number, os.waitstatus_to_exitcode(status)))

    def _answer(self, answer: Forked | Ended | Unforkable) -> None:
        with contextlib.suppress(OSError):  # the parent is gone, which the loop sees next
            send(self._sock, answer)


def _loses_gpus() -> str:
    """Why a fork of this process could not use a GPU, in words; "" if it can.

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
    """Why this process can't be forked, in words; "" if it can."""
    tasks = Path("/proc/self/task")
    threads = [path for path in tasks.iterdir() if int(path.name) != os.getpid()]
    if not threads:
        return ""
    names = ", ".join(sorted({(path / "comm").read_text().strip() for path in threads}))
    return f"what it imported has started {len(threads)} thread(s), named {names}"


def _become_worker(fds: list[int]) -> WorkerBoot:
    """Make a fork of the zygote what a process of its own would have been."""
    child_fd, counters_fd, stdout_fd, stderr_fd = fds
    with open(child_fd, "rb") as file:  # noqa: PTH123 - a descriptor
        child: Child = pickle.load(file)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(stdout_fd, 1)
    os.dup2(stderr_fd, 2)
    os.close(stdout_fd)
    os.close(stderr_fd)
    _reconfigure(sys.stdout, line_buffering=os.isatty(1))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(child.environ)
    with contextlib.suppress(OSError):  # the folder is gone: that would not keep it from starting
        os.chdir(child.folder)
    os.sched_setaffinity(0, child.boot.cores or child.cores)
    sys.path[:] = child.boot.sys_path
    if threads := child.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads.split(",")[0]))
    random.seed()
    np.random.seed()  # noqa: NPY002 - the state that envs may use
    torch.seed()
    return replace(child.boot, counters_fd=counters_fd)


def _reconfigure(stream: Any, *, line_buffering: bool) -> None:
    stream.reconfigure(line_buffering=line_buffering)
