"""Where a collector's workers come from: this process starts them here, or the launch has them."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Protocol

from .config import Faults
from .errors import ArgumentError, CollectorStateError, DeadlineError, WorkerError
from .link import Connection, Gate, GateEvents, Message
from .membership import TRAINER_PEER, Member, Members, Spawner
from .processes import LocalProcesses
from .rpc import RpcTransport
from .threads import arrives
from .topology import LOOPBACK, interface_of, num_cores
from .worker import Probe

log = logging.getLogger(__name__)

_FAREWELL_S = 20.0


class Cluster(Protocol):
    """What can start workers for a collector.

    Attributes:
        gate: where they join; workers are reported to whoever :meth:`attach` named.
        address: this host's, on the interface by which workers reach it.
    """

    gate: Gate
    address: str

    def num_workers(self, wanted: int | None) -> int:
        """How many workers a collector gets that asks for ``wanted`` (None: all there are).

        Raises:
            ArgumentError: more than there are.
        """

    def attach(self, workers: GateEvents, num_workers: int, timeout_s: float) -> None:
        """Report workers to ``workers``, once ``num_workers`` can be started.

        Raises:
            DeadlineError: the launch's other ranks didn't come.
        """

    def boot(self, num_workers: int) -> dict[str, Any]:
        """What the process of one of ``num_workers`` workers is told at its start."""

    def spawner(self, on_exit: Callable[[int, int], None]) -> Spawner:
        """Starts worker processes; reports the exit code of each."""

    def release(self) -> None:
        """The collector is done with it."""


class LocalCluster:
    """Workers on this host, started by this process: the embedded default."""

    def __init__(self) -> None:
        self.address = LOOPBACK
        self._token = secrets.token_hex(16)
        self.gate = Gate(self.address, self._token, GateEvents())

    def num_workers(self, wanted: int | None) -> int:
        """See :class:`Cluster`: as many as one likes, by default one for each core."""
        return num_cores() if wanted is None else wanted

    def attach(self, workers: GateEvents, num_workers: int, timeout_s: float) -> None:
        """See :class:`Cluster`."""
        self.gate.events = workers

    def boot(self, num_workers: int) -> dict[str, Any]:
        """See :class:`Cluster`."""
        return {
            "host": self.address,
            "port": self.gate.port,
            "token": self._token,
            "num_threads": max(1, num_cores() // num_workers),
        }

    def spawner(self, on_exit: Callable[[int, int], None]) -> Spawner:
        """See :class:`Cluster`."""
        return LocalProcesses(on_exit)

    def release(self) -> None:
        """See :class:`Cluster`."""
        self.gate.close()


class LaunchedCluster(GateEvents):
    """Workers that supervisors, the launch's ranks above 0, start on their hosts.

    Rank r's worker is worker r - 1.
    """

    def __init__(self, address: str, token: str, num_workers: int, port: int = 0) -> None:
        """Listen on ``address``. Raises as :func:`~distcollect.topology.listen` does."""
        self.address = address
        self._num_workers = num_workers
        self._supervisors: dict[int, Connection] = {}
        self._seen: set[int] = set()  # ranks that have joined, whether or not they are still there
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._workers = GateEvents()
        self._spawner: _SupervisedProcesses | None = None
        self.gate = Gate(address, token, self, port)

    def num_workers(self, wanted: int | None) -> int:
        """See :class:`Cluster`: at most the worker ranks of the launch."""
        if wanted is not None and wanted > self._num_workers:
            raise ArgumentError(
                f"num_workers={wanted}, but this launch has {self._num_workers} worker rank(s) "
                "beside the trainer; launch more processes or ask for fewer workers"
            )
        return self._num_workers if wanted is None else wanted

    def attach(self, workers: GateEvents, num_workers: int, timeout_s: float) -> None:
        """See :class:`Cluster`."""
        self._workers = workers
        with self._lock:
            if not self._changed.wait_for(lambda: not self._missing(num_workers), timeout_s):
                raise DeadlineError(
                    f"ranks {self._missing(num_workers)} did not join within {timeout_s:g} s; "
                    "does every rank call distcollect.run(main)?"
                )

    def boot(self, num_workers: int) -> dict[str, Any]:
        """See :class:`Cluster`; each supervisor adds what it knows better."""
        return {}

    def spawner(self, on_exit: Callable[[int, int], None]) -> Spawner:
        """See :class:`Cluster`."""
        self._spawner = _SupervisedProcesses(self._supervisors, on_exit)
        return self._spawner

    def release(self) -> None:
        """See :class:`Cluster`; the supervisors wait for the next collector."""
        self._workers = GateEvents()
        self._spawner = None

    def close(self) -> None:
        """Send the supervisors home: the trainer is done.

        Ranks that are still on their way here are waited for a little: they would look for a
        trainer that is gone.
        """
        with self._lock:
            self._changed.wait_for(lambda: len(self._seen) == self._num_workers, _FAREWELL_S)
            for connection in self._supervisors.values():
                connection.send({"bye": True})
        self.gate.close()

    def admit(self, connection: Connection) -> Message:
        """See :class:`~distcollect.link.GateEvents`."""
        if connection.hello["role"] != "supervisor":
            return self._workers.admit(connection)
        with self._lock:
            self._supervisors[connection.hello["rank"] - 1] = connection
            self._seen.add(connection.hello["rank"])
            self._changed.notify_all()
        return {}

    def refused(self, hello: Message, reason: str) -> None:
        """See :class:`~distcollect.link.GateEvents`."""
        if hello.get("role") == "supervisor":
            hello = {**hello, "worker_id": hello.get("rank", 0) - 1}
        self._workers.refused(hello, reason)

    def received(self, connection: Connection, message: Message) -> None:
        """See :class:`~distcollect.link.GateEvents`."""
        if connection.hello["role"] != "supervisor":
            self._workers.received(connection, message)
        elif "exited" in message and self._spawner is not None:
            self._spawner.exited(message["exited"], message["code"])

    def closed(self, connection: Connection) -> None:
        """See :class:`~distcollect.link.GateEvents`."""
        if connection.hello["role"] != "supervisor":
            self._workers.closed(connection)
            return
        with self._lock:
            self._supervisors.pop(connection.hello["rank"] - 1, None)

    def _missing(self, num_workers: int) -> list[int]:
        return [i + 1 for i in range(num_workers) if i not in self._supervisors]


class _SupervisedProcesses:
    """The processes that the supervisors run for one collector."""

    def __init__(
        self, supervisors: Mapping[int, Connection], on_exit: Callable[[int, int], None]
    ) -> None:
        self._supervisors = supervisors
        self._on_exit = on_exit
        self._running: set[int] = set()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)

    def spawn(self, worker_id: int, boot: Mapping[str, Any], env: Mapping[str, str]) -> None:
        with self._lock:
            self._running.add(worker_id)
        self._supervisors[worker_id].send({"spawn": worker_id, "boot": boot, "env": dict(env)})

    def kill(self, worker_id: int) -> None:
        if supervisor := self._supervisors.get(worker_id):
            supervisor.send({"kill": worker_id})

    def exited(self, worker_id: int, code: int) -> None:
        with self._lock:
            self._running.discard(worker_id)
            self._changed.notify_all()
        self._on_exit(worker_id, code)

    def close(self, grace_s: float) -> None:
        def reachable() -> list[int]:
            return [w for w in self._running if w in self._supervisors]

        with self._lock:
            if self._changed.wait_for(lambda: not reachable(), grace_s):
                return
            remaining = reachable()
            log.warning("workers %s did not end within %g s: killing them", remaining, grace_s)
        for worker_id in remaining:
            self.kill(worker_id)
        with self._lock:
            self._changed.wait_for(lambda: not reachable(), grace_s)


def _nobody_listens(worker_id: int) -> None:
    log.debug("worker %d is lost, before anybody asked it for anything", worker_id)


_launched: LaunchedCluster | None = None
_in_use = threading.Lock()


def set_launched(cluster: LaunchedCluster | None) -> None:
    """Make ``cluster`` what this process's collectors use; None: their own local workers."""
    global _launched  # noqa: PLW0603 - a process has one place in its launch
    _launched = cluster


def current() -> LaunchedCluster | None:
    """The launch's workers; None where there is no launch."""
    return _launched


_open: weakref.WeakSet[Workers] = weakref.WeakSet()


def close_workers() -> None:
    """End the workers of a collector that nobody has shut down."""
    for workers in list(_open):
        workers.close()


class Workers:
    """The running workers of one collector: their processes and transport.

    Attributes:
        transport: reaches them.
        peers: ``{worker_id: peer}``.
        address: this host's, on the interface by which they reach it.
        on_lost: is told the worker_id of one that is lost.
    """

    def __init__(self, num_workers: int | None, faults: Faults) -> None:
        """Start them, and wait until all have joined.

        Raises:
            ArgumentError: the launch doesn't have as many.
            CollectorStateError: another collector is open.
            WorkerError, DeadlineError: they didn't all come. Nothing is left running then.
        """
        launched = current()
        if launched is not None:
            launched.num_workers(num_workers)
        if not _in_use.acquire(blocking=False):
            raise CollectorStateError(
                "another collector is open in this process; call its shutdown() first (or use "
                "it in a with block)"
            )
        self._faults = faults
        self.on_lost: Callable[[int], None] = _nobody_listens
        with contextlib.ExitStack() as undo:
            undo.callback(_in_use.release)
            cluster: Cluster = LocalCluster() if launched is None else launched
            undo.callback(cluster.release)
            count = cluster.num_workers(num_workers)
            self.transport = RpcTransport(TRAINER_PEER, interface=interface_of(cluster.address))
            undo.callback(self.transport.close)
            self._members = Members(cluster.gate, self.transport, count, self._member_lost)
            cluster.attach(self._members, count, faults.start_timeout_s)
            spawner = cluster.spawner(self._members.exited)
            # Half of the grace is for what they still owe, half for their end.
            undo.callback(spawner.close, faults.stop_timeout_s / 2)
            # Workers stop, and answer what they still owe, but end only when the trainer's agent
            # has: else it would log a warning for each connection that breaks.
            undo.callback(self._members.dismiss)
            undo.callback(self.transport.close, faults.stop_timeout_s / 2)
            undo.callback(self._members.stop)
            # Torch's C++ side logs a warning for each peer whose process ends: no news here.
            env = {"TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")}
            self._members.start(spawner, cluster.boot(count), env)
            self._members.wait_ready(faults.start_timeout_s)
            self.peers = self._members.peers
            self.address = cluster.address
            _open.add(self)
            self._undo = undo.pop_all()

    def configure(self, payloads: Mapping[int, bytes]) -> dict[int, Probe]:
        """Send each worker its pickled plan; what each found when it tried it out.

        Raises:
            WorkerError: one failed; says which and carries its traceback.
            DeadlineError: one took too long.
        """
        deadline = time.monotonic() + self._faults.start_timeout_s
        answers: dict[int, Future[Probe]] = {
            worker_id: self.transport.call(peer, "configure", payloads[worker_id])
            for worker_id, peer in self.peers.items()
        }
        probes: dict[int, Probe] = {}
        for worker_id, answer in answers.items():
            if not arrives(answer, deadline - time.monotonic()):
                raise DeadlineError(
                    f"worker {worker_id} did not make and reset its envs within "
                    f"{self._faults.start_timeout_s:g} s; Faults(start_timeout_s=...) gives longer"
                )
            try:
                probes[worker_id] = answer.result()
            except WorkerError as error:
                raise self.explain(worker_id, error) from error.__cause__
        return probes

    def explain(self, worker_id: int, error: WorkerError) -> WorkerError:
        """The better error where ``error`` says no more than that a worker can't be reached."""
        return self._members.failure_of(worker_id) if error.worker_id is None else error

    def close(self) -> None:
        """End all workers and reap them. Again is no error."""
        self._undo.close()

    def _member_lost(self, member: Member) -> None:
        self.transport.evict(member.peer)
        self.on_lost(member.worker_id)
