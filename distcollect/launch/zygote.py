"""What workers take over from the process that starts them, and its zygote, which forks them.

:mod:`distcollect.worker.zygote` is the other side.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, wait
from dataclasses import dataclass
from pathlib import Path

from distcollect.common import memory_segment, open_files, worker_guard
from distcollect.common.waiting import answer
from distcollect.errors import ArgumentError
from distcollect.launch.run_folder import SECRET_VARIABLE
from distcollect.net.messages import WorkerBoot

log = logging.getLogger(__name__)

ZYGOTE = "DISTCOLLECT_ZYGOTE"

_START_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 5.0
_ANSWER_TIMEOUT_S = 1.0
_LONGEST_BYTES = 65536
_DEFAULTS = {
    # Threads of numpy's OpenBLAS start when it is loaded, and a process with threads isn't forked.
    "OPENBLAS_NUM_THREADS": "1",
    # Some libraries ask for the number of GPUs when they are loaded. Torch's usual way to answer
    # loads the driver, and no fork of a process that has done so can use a GPU.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    # Torch's C++ side logs a warning for each peer whose process ends; that is reported anyhow.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}

# The envs of a trainer that has imported these need them in each worker.
_PRELOADED_IF_USED = ("torchrl.envs",)

# First of all it is made sure that it ends with its parent: the imports take seconds. They make
# objects that stay: searching these for garbage again and again would take a quarter of the time.
# Python puts the working folder on the path: a ctypes.py there is not the one that is wanted.
_CODE = """
import sys
sys.path[:] = filter(None, sys.path)
import ctypes, gc, os
gc.disable()
ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG, SIGKILL
if os.getppid() != {parent}:
    os._exit(1)
sys.path[:] = {path!a}
from distcollect.worker.zygote import serve
boot = serve({fd}, {imported!r}, {mask!r})
from distcollect.worker.main import main
main(boot)
"""

# These change often, and nothing reads them when it is loaded.
_NOT_READ_AT_IMPORT = ("DISTCOLLECT_", "PYTEST_CURRENT_TEST")
# os.system() ignores them while it runs, a notebook between its cells; workers ignore SIGINT.
_IGNORED_AT_TIMES = {signal.SIGINT, signal.SIGQUIT}
# Of /proc/self/status: who a process is, what it may do, and the mode of its new files. Not all
# kernels have all.
_STATUS = ("Uid", "Gid", "Groups", "Cap", "NoNewPrivs", "Seccomp", "Umask")

_KEEP, _COLLECTOR, _OFF = "keep", "collector", "off"  # the values of the variable


def _use() -> str:
    """Return whether workers are forked from a zygote, and whether it waits for collectors.

    Raises:
        ArgumentError: the environment variable has another value.
    """
    value = os.environ.get(ZYGOTE, _KEEP)
    if value not in (_KEEP, _COLLECTOR, _OFF):
        raise ArgumentError(f"{ZYGOTE}={value!r}: must be one of {_KEEP}, {_COLLECTOR}, {_OFF}")
    return value


@dataclass(frozen=True)
class Inheritance:
    """What workers, replacements too, get of this process as it was at one time.

    Libraries change variables for a while, and a script may go to another folder.

    Attributes:
        environ: environment variables.
        folder: the working folder; "" if it was removed.
        sys_path: where modules are looked for.
    """

    environ: Mapping[str, str]
    folder: str
    sys_path: tuple[str, ...]

    @classmethod
    def now(cls) -> Inheritance:
        """Note what a worker gets that is started now."""
        # Other threads may change it meanwhile. What envs start has no use for the token.
        values = {name: os.environ.get(name) for name in os.environ if name != SECRET_VARIABLE}
        # TensorDict writes that for an option which was set for a while, and later can't read it.
        if values.get("LAZY_LEGACY_OP") == "None":
            del values["LAZY_LEGACY_OP"]
        try:
            folder = str(Path.cwd())
        except FileNotFoundError:
            folder = ""
        # Python ignores what else is on the path, such as a ``Path``.
        sys_path = tuple(entry for entry in sys.path if isinstance(entry, str))
        environ = {name: value for name, value in values.items() if value is not None}
        return cls(environ, folder, sys_path)

    def origin(self) -> tuple[object, ...]:
        """List what a process also takes over that starts now, or libraries read when they load."""
        environ, may_be_ignored = self.environ.items(), signal.valid_signals() - _IGNORED_AT_TIMES
        status = Path("/proc/self/status").read_text().splitlines()
        return (
            {name: value for name, value in environ if not name.startswith(_NOT_READ_AT_IMPORT)},
            [line for line in status if line.startswith(_STATUS)],
            Path("/proc/self/limits").read_text(),
            (os.getpriority(os.PRIO_PROCESS, os.getpid()), os.sched_getscheduler(os.getpid())),
            [each for each in may_be_ignored if signal.getsignal(each) is signal.SIG_IGN],
        )


class WorkerProcess:
    """A worker that was requested from a zygote, behind its guard.

    Attributes:
        pid: the guard's process id; None until it was forked.
        end: completes with its exit code, -N if signal N ended it, and with the reason why it could
            not be started, "" if it was.
    """

    def __init__(self, number: int, zygote: Zygote) -> None:
        self.pid: int | None = None
        self.end: Future[tuple[int, str]] = Future()
        self._number = number
        self._zygote = zygote

    def send_signal(self, number: int) -> None:
        """Send the guard a signal, see :mod:`distcollect.common.worker_guard`."""
        self._zygote.send(self._number, number)
        if self.pid is None and number == worker_guard.KILL:
            # The zygote still imports. It forks the worker later, and ends it at once.
            self.note_end(-signal.SIGKILL)

    def kill(self) -> None:
        """End it at once, though its guard or the zygote hangs."""
        if self.pid is not None:
            with contextlib.suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)
        if wait([self.end], _ANSWER_TIMEOUT_S).not_done:
            self._zygote.close()

    def note_end(self, code: int, reason: str = "") -> None:
        """Complete :attr:`end`."""
        with contextlib.suppress(InvalidStateError):  # it was killed before it was forked
            self.end.set_result((code, reason))


class Zygote:
    """A process that starts workers, started by this process.

    Attributes:
        pid: its process id.
        is_gone: it has ended.
    """

    def __init__(self, inheritance: Inheritance) -> None:
        """Start it; it imports what it needs while this process goes on.

        Raises:
            OSError: the system can't start it.
        """
        self._lock = threading.RLock()
        self._workers: dict[int, WorkerProcess] = {}
        self._numbers = itertools.count()
        self.is_gone = False
        self._origin = inheritance.origin()
        # Both ends of a connection that keeps messages apart.
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        started: Future[subprocess.Popen[bytes]] = Future()
        # The kernel ends the zygote with the thread that starts it: this one lasts.
        self._reader = threading.Thread(
            target=self._run,
            args=(inheritance, theirs, started),
            name="distcollect-zygote",
            daemon=True,
        )
        self._reader.start()
        self._process = started.result(_START_TIMEOUT_S)
        self.pid = self._process.pid

    def is_usable(self, inheritance: Inheritance) -> bool:
        """Return True if it can start workers of this process as it is now."""
        return not self.is_gone and self._origin == inheritance.origin()

    def start(self, start: object, fds: Sequence[int], *, as_new_python: bool) -> WorkerProcess:
        """Request a worker, which gets ``start``. That may be large, so it travels in a file.

        Args:
            start: see above.
            fds: descriptors of stdout, of stderr, of its counters and, if it has it already, of its
                connection.
            as_new_python: whether it is not to be a mere fork.

        Raises:
            OSError: the zygote is gone, or no file for the request can be made.
        """
        with memory_segment.small_file() as file:
            pickle.dump(start, file)
            file.flush()
            with self._lock:
                number = next(self._numbers)
                self._send(number, int(as_new_python), [file.fileno(), *fds])
                worker = self._workers[number] = WorkerProcess(number, self)
        return worker

    def send(self, number: int, signal_number: int) -> None:
        """Have a worker's guard signalled; do nothing if the zygote is gone."""
        with contextlib.suppress(OSError):
            self._send(number, signal_number)

    def _send(self, number: int, signal_number: int, fds: Sequence[int] = ()) -> None:
        socket.send_fds(self._sock, [pickle.dumps((number, signal_number))], fds)

    def retire(self) -> None:
        """Have it end when its last worker has ended."""
        self.send(-1, 0)

    def close(self) -> None:
        """End it and its workers at once; it is gone when this returns."""
        try:
            self._process.kill()
        except PermissionError:  # this process has another user by now
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._reader:
            self._reader.join(_END_TIMEOUT_S)

    def _run(
        self,
        inheritance: Inheritance,
        theirs: socket.socket,
        started: Future[subprocess.Popen[bytes]],
    ) -> None:
        with theirs:
            answer(started, _start, inheritance, theirs.fileno())
        if started.exception() is not None:
            self._sock.close()
            return
        while self._note_next():
            pass
        # It has ended, or does so at once: it closes its socket only then.
        code = started.result().wait()
        with self._lock:
            self.is_gone = True
            lost = list(self._workers.values())
            self._workers.clear()
        self._sock.close()
        reason = f"it could not be started: the process to fork it from has ended with code {code}"
        for worker in lost:
            # The guard of one that was forked sees that the zygote is gone.
            worker.note_end(-signal.SIGKILL, reason if worker.pid is None else "")

    def _note_next(self) -> bool:
        """Take in what the zygote says next; return False once it is gone."""
        try:
            number, is_over, value, why = pickle.loads(self._sock.recv(_LONGEST_BYTES))
        except (OSError, EOFError):
            return False
        with self._lock:
            worker = self._workers.pop(number) if is_over else self._workers[number]
        if is_over:
            worker.note_end(value, why)
            return True
        worker.pid = value
        if why:
            log.warning("a worker starts by itself, which takes longer: %s", why)
        return True


def _start(inheritance: Inheritance, fd: int) -> subprocess.Popen[bytes]:
    # It inherits that from this thread.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    code = _CODE.format(
        parent=os.getpid(),
        path=list(inheritance.sys_path),
        fd=fd,
        imported=[name for name in _PRELOADED_IF_USED if name in sys.modules],
        mask=[int(number) for number in mask],
    )
    isolated = ["-I"] if sys.flags.isolated else []  # from the environment
    with open_files.output_streams() as (_, stderr):
        return subprocess.Popen(
            [sys.executable, *isolated, "-c", code],
            # In a folder that was removed, oneMKL ends the process.
            cwd=None if inheritance.folder else "/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            start_new_session=True,
            env={**_DEFAULTS, **inheritance.environ},
            pass_fds=[fd],
        )


_zygote: Zygote | None = None
_users: weakref.WeakSet[object] = weakref.WeakSet()
_lock = threading.RLock()


def warm_up(inheritance: Inheritance, user: object = None) -> None:
    """Start this process's zygote, so that it imports while this process does other things.

    Args:
        inheritance: of the workers to come.
        user: keeps it until :func:`end_if_unwanted`; None: nobody does.

    Raises:
        ArgumentError: see :func:`_use`.
    """
    if user is not None:
        with _lock:
            _users.add(user)
    if _use() != _OFF:
        with contextlib.suppress(OSError):  # start() tries again, and raises
            _current(inheritance)


def start(
    boot: WorkerBoot,
    inheritance: Inheritance,
    cores: Iterable[int],
    streams: Sequence[int],
) -> WorkerProcess:
    """Request a worker from this process's zygote.

    Args:
        boot: what it starts with.
        inheritance: what it gets of this process.
        cores: to run on.
        streams: descriptors for stdout and stderr.

    Raises:
        OSError: the system can't start it.
    """
    usual, added = {**_DEFAULTS, **inheritance.environ}, boot.wanted.env
    # Libraries may read a variable that is another one here when they are loaded.
    as_new_python = _use() == _OFF or any(usual.get(name) != added[name] for name in added)
    start = (boot, {**inheritance.environ, **added}, inheritance.folder, cores)
    with _lock:  # else another collector may retire it, and it would end before it gets the request
        zygote = _current(inheritance)
        fds = [*streams, boot.counters_fd, boot.control_fd][: 3 + (boot.control_fd >= 0)]
        return zygote.start(start, fds, as_new_python=as_new_python)


def pid() -> int | None:
    """The process id of this process's zygote; None if there is none."""
    zygote = _zygote
    return None if zygote is None or zygote.is_gone else zygote.pid


def end_if_unwanted(user: object) -> None:
    """``user`` is done: end the zygote if nobody uses it and it is not to wait for a collector."""
    global _zygote  # noqa: PLW0603 - a process has one
    with _lock:
        _users.discard(user)
        if _users:
            return
        if _zygote is not None and _use() != _KEEP:
            _zygote.retire()
            _zygote = None


def close() -> None:
    """End this process's zygote, if there is one."""
    global _zygote
    with _lock:
        zygote, _zygote = _zygote, None
    if zygote is not None:
        zygote.close()


def _current(inheritance: Inheritance) -> Zygote:
    global _zygote  # noqa: PLW0603 - a process has one
    with _lock:
        if _zygote is not None and not _zygote.is_usable(inheritance):
            _zygote.retire()
            _zygote = None
        if _zygote is None:
            _zygote = Zygote(inheritance)
        return _zygote


def _forget() -> None:
    """In a forked child of this process: the zygote is its parent's."""
    global _zygote, _users, _lock
    _zygote, _users, _lock = None, weakref.WeakSet(), threading.RLock()


os.register_at_fork(after_in_child=_forget)
atexit.register(close)
