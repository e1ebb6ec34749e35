"""Where workers' processes are started: by this process, or by supervisors on other hosts.

A supervisor is a small process that joins the trainer and starts and watches worker processes on
its word. Every rank of a launch above 0 is one, and so is ``distcollect worker --join``.
"""

from __future__ import annotations

import logging
import os
import secrets
import shlex
import stat
import threading
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from distcollect.errors import ArgumentError, DeadlineError, LaunchError
from distcollect.launch.cpu_placement import Host, choose, may_pin, num_cores
from distcollect.launch.local_processes import End, LocalProcesses, ProcessEvents
from distcollect.launch.run_folder import TOKEN_VARIABLE, RunFolder
from distcollect.net.framing import Message
from distcollect.net.interfaces import LOOPBACK, is_address
from distcollect.net.server import Connection, JoinServer, JoinServerEvents
from distcollect.transport.peer_ids import TRAJ_IDS_PER_TRAINER

log = logging.getLogger(__name__)

_FAREWELL_S = 20.0
LISTEN = "DISTCOLLECT_LISTEN"
_SECRET = "DISTCOLLECT_TOKEN"  # noqa: S105 - a name
_HOLDS_TOKEN = "it has to hold the run's secret, the same for the trainer and all who join"  # noqa: S105


class ClusterEvents(JoinServerEvents, ProcessEvents):
    """What a cluster reports of workers, on threads of its own."""

    def place_opened(self, worker_id: int) -> None:
        """A process for this slot can be started, where none could be."""

    def place_lost(self, worker_id: int) -> None:
        """None can be started any more."""

    def launch_ended(self) -> None:
        """The trainer's ``main()`` is done: end what is still running."""


class Cluster(JoinServerEvents):
    """The hosts of a run.

    Attributes:
        gate: where workers and supervisors join.
        address: this host's, on the interface by which they reach it.
        first_traj_id: no trajectory of this trainer's has a lower id, and none of another's one
            from here on, to the next trainer's.
        store: torchrun's, which goes with its last mention where this process serves it.
        patience_s: see :attr:`gathers`.
    """

    store: Any = None

    def __init__(
        self,
        address: str,
        token: str,
        *,
        num_ranks: int | None = None,
        num_local: int = 0,
        num_expected: int | None = None,
        patience_s: float = 0.0,
        port: int = 0,
        trainer: int = 0,
    ) -> None:
        """Listen on ``address``.

        Args:
            address: see above.
            token: what all have to show.
            num_ranks: worker ranks of the launch: rank r's supervisor has slot r - 1. None: there
                is no launch.
            num_local: slots, from 0, whose processes this process starts itself.
            num_expected: so many workers join by themselves, some time; None: nobody need come.
            patience_s: how long to wait for enough of these to be there.
            port: to listen on; 0: any that is free.
            trainer: which of the launch's trainers this is.

        Raises:
            LaunchError: see :func:`~distcollect.net.interfaces.listen`.
        """
        self.address = address
        self.first_traj_id = trainer * TRAJ_IDS_PER_TRAINER
        self.patience_s = patience_s
        self._num_expected = num_expected
        self._token = token
        self._num_ranks = num_ranks
        self._num_local = num_local
        host, pin = Host.look(), may_pin(os.environ)
        self._places = [choose(host, i, num_local, may_pin=pin) for i in range(num_local)]
        self._num_wanted = 0
        self._events = ClusterEvents()
        self._supervisors: dict[int, Connection] = {}
        self._arriving: set[int] = set()  # slots whose supervisor is being welcomed
        self._seen: set[int] = (
            set()
        )  # slots whose rank has joined, whether or not it still is there
        self._remote: set[tuple[int, int]] = set()  # processes that supervisors run
        self._local: LocalProcesses | None = None
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self.gate = JoinServer(address, token, self, port)

    @property
    def gathers(self) -> bool:
        """Whether workers come and go by themselves, so that too few are waited for."""
        return self._num_expected is not None

    def num_workers(self, wanted: int | None) -> int:
        """How many workers a collector gets that asks for ``wanted`` (None: all there are).

        Raises:
            ArgumentError: more than there are.
        """
        if self._num_expected is not None:
            return self._num_expected if wanted is None else wanted
        if self._num_ranks is None:
            return self._num_local
        if wanted is not None and wanted > self._num_ranks:
            raise ArgumentError(
                f"num_workers={wanted}, but this launch has {self._num_ranks} worker rank(s) "
                "beside the trainer; launch more processes or ask for fewer workers"
            )
        return self._num_ranks if wanted is None else wanted

    def attach(self, events: ClusterEvents, num_workers: int, timeout_s: float) -> None:
        """Report to ``events``, once ``num_workers`` can be started.

        Raises:
            DeadlineError: the launch's other ranks didn't come.
        """
        self._num_wanted = num_workers
        self._events = events
        if self._num_ranks is None:
            self._local = LocalProcesses(events)

        first = self._num_local

        def missing() -> list[int]:
            return [i + 1 for i in range(first, num_workers) if i not in self._supervisors]

        with self._lock:
            if not self._changed.wait_for(lambda: not missing(), timeout_s):
                raise DeadlineError(
                    f"ranks {missing()} did not join within {timeout_s:g} s: look at what they "
                    "say themselves. Does every rank call distcollect.run(main)? 'distcollect "
                    "doctor' looks at the way between hosts"
                )
            further = [w for w in self._supervisors if w >= num_workers and self._is_wanted(w)]
        for worker_id in further:
            events.place_opened(worker_id)

    def _is_wanted(self, worker_id: int) -> bool:
        """Whether the collector has this slot: not that of a rank more than it asked for."""
        return worker_id < self._num_wanted or worker_id >= (self._num_ranks or 0)

    def spawn(
        self, worker_id: int, incarnation: int, boot: Mapping[str, Any], env: Mapping[str, str]
    ) -> None:
        """Start a process for a slot.

        Raises:
            OSError: the system can't.
            LaunchError: nobody is there who could.
        """
        boot = {**boot, "first_traj_id": self.first_traj_id}
        with self._lock:
            supervisor = self._supervisors.get(worker_id)
            if supervisor is not None:
                self._remote.add((worker_id, incarnation))
        if supervisor is not None:
            message = {"spawn": worker_id, "incarnation": incarnation, "boot": boot}
            supervisor.send({**message, "env": dict(env)})
        elif self._local is not None and worker_id < self._num_local:
            here = {
                "host": self.address,
                "port": self.gate.port,
                "token": self._token,
                **asdict(self._places[worker_id]),
            }
            self._local.spawn(worker_id, incarnation, {**boot, **here}, env)
        else:
            raise LaunchError(f"the supervisor of worker {worker_id} is gone")

    def kill(self, worker_id: int, incarnation: int) -> None:
        """End a process at once; nothing if it has ended."""
        supervisor = self._supervisors.get(worker_id)
        if supervisor is not None:
            supervisor.send({"kill": worker_id, "incarnation": incarnation})
        elif self._local is not None:
            self._local.kill(worker_id, incarnation)

    def end_processes(self, grace_s: float) -> None:
        """Wait up to ``grace_s`` for all processes to end by themselves, then end them."""
        if self._local is not None:
            self._local.close(grace_s)

        def reachable() -> list[tuple[int, int]]:
            return [key for key in self._remote if key[0] in self._supervisors]

        with self._lock:
            if self._changed.wait_for(lambda: not reachable(), grace_s):
                return
            remaining = reachable()
            log.warning("%s did not end within %g s: killing it", remaining, grace_s)
        for key in remaining:
            self.kill(*key)
        with self._lock:
            self._changed.wait_for(lambda: not reachable(), grace_s)

    def release(self) -> None:
        """The collector is done with it; without a launch that ends it."""
        self._events = ClusterEvents()
        self._local = None
        with self._lock:
            self._remote.clear()
        if self._num_ranks is None and not self.gathers:
            self._dismiss()

    def close(self, *, failed: bool = False, resumes: bool = False) -> None:
        """Send the supervisors home: the trainer is done.

        Ranks that are still on their way here are waited for a little: they would look for a
        trainer that is gone.

        Args:
            failed: whether it ends by an error; then its launch's ranks do so too.
            resumes: it will be started again, and those who joined by themselves are to wait.
        """
        # While the supervisors are still there to end what it started.
        self._events.launch_ended()
        with self._lock:
            if self._num_ranks is not None:
                self._changed.wait_for(lambda: len(self._seen) == self._num_ranks, _FAREWELL_S)
        self._dismiss(failed=failed, resumes=resumes)

    def _dismiss(self, *, failed: bool = False, resumes: bool = False) -> None:
        for connection in list(self._supervisors.values()):
            waits = resumes and not connection.hello.get("rank")
            connection.send({"bye": True, "failed": failed, "wait": waits})
        self.gate.close()

    def admit(self, connection: Connection) -> Message:
        """See :class:`~distcollect.net.server.JoinServerEvents`."""
        if connection.hello.get("role") != "supervisor":
            return self._events.admit(connection)
        with self._lock:
            worker_id = self._slot_for(connection.hello.get("rank"))
            self._arriving.add(worker_id)
        connection.hello["worker_id"] = worker_id
        return {"worker_id": worker_id}

    def admitted(self, connection: Connection) -> None:
        """See :class:`~distcollect.net.server.JoinServerEvents`."""
        if connection.hello.get("role") != "supervisor":
            return
        worker_id = connection.hello["worker_id"]
        with self._lock:
            self._arriving.discard(worker_id)
            came_again = worker_id in self._supervisors
            self._supervisors[worker_id] = connection
            self._forget_remote(worker_id)
            if connection.hello.get("rank"):
                self._seen.add(worker_id)
            self._changed.notify_all()
        if self._is_wanted(worker_id):
            if came_again:  # before its old connection was seen to end, with what it had started
                self._events.place_lost(worker_id)
            self._events.place_opened(worker_id)

    def _forget_remote(self, worker_id: int) -> None:
        """Its processes end with a supervisor's connection, and nobody reports them."""
        self._remote = {key for key in self._remote if key[0] != worker_id}

    def _slot_for(self, rank: int | None) -> int:
        """A rank's own, or the first one that nobody provides for."""
        if rank:
            return rank - 1
        awaited = set(range(self._num_ranks or 0)) - self._seen
        taken = self._supervisors.keys() | self._arriving | awaited
        return next(i for i in range(self._num_local, 2**31) if i not in taken)

    def refused(self, hello: Message, reason: str) -> None:
        """See :class:`~distcollect.net.server.JoinServerEvents`."""
        if hello.get("role") == "supervisor":
            hello = {**hello, "worker_id": (hello.get("rank") or 0) - 1}
        self._events.refused(hello, reason)

    def received(self, connection: Connection, message: Message) -> None:
        """See :class:`~distcollect.net.server.JoinServerEvents`."""
        if connection.hello.get("role") != "supervisor":
            self._events.received(connection, message)
            return
        if not {"exited", "bloated"} & message.keys():
            return
        key = (connection.hello["worker_id"], message["incarnation"])
        if "bloated" in message:
            self._events.bloated(*key, message["bloated"])
            return
        # First: who waits for the last process to end goes by what was reported of it.
        self._events.exited(*key, End(**message["exited"]))
        with self._lock:
            self._remote.discard(key)
            self._changed.notify_all()

    def closed(self, connection: Connection) -> None:
        """See :class:`~distcollect.net.server.JoinServerEvents`."""
        if connection.hello.get("role") != "supervisor":
            self._events.closed(connection)
            return
        worker_id = connection.hello["worker_id"]
        with self._lock:
            self._arriving.discard(worker_id)
            # Not if it has come again, before its old connection was seen to end.
            if self._supervisors.get(worker_id) is not connection:
                return
            del self._supervisors[worker_id]
            self._forget_remote(worker_id)
            self._changed.notify_all()
        self._events.place_lost(worker_id)


_launched: Cluster | None = None


def set_launched(cluster: Cluster | None) -> None:
    """Make ``cluster`` what this process's collectors use; None: their own local workers."""
    global _launched  # noqa: PLW0603 - a process has one place in its launch
    _launched = cluster


def current() -> Cluster | None:
    """The launch's hosts; None where there is no launch."""
    return _launched


def open_cluster(
    num_workers: int | None, listen: str | None = None, *, local: bool = False
) -> Cluster:
    """The launch's hosts, else this one.

    Args:
        num_workers: local ones to be started, where there is no launch; None: one for each core.
        listen: "HOST:PORT" where others may join; None: what DISTCOLLECT_LISTEN says.
        local: this host in any case.

    Raises:
        ArgumentError: ``listen`` is no such thing, or there is no token for those who join.
        LaunchError: see :func:`~distcollect.net.interfaces.listen`; or there are workers that would
            never be found.
    """
    if _launched is not None and not local:
        if listen is not None:
            raise ArgumentError(
                f"listen={listen!r}: under a launcher others join where its trainer listens; set "
                f"{LISTEN} for it instead"
            )
        return _launched
    folder = RunFolder.here()
    if folder is not None and folder.num_workers and not local:
        raise LaunchError(
            f"the workers of the run in {folder.path} are in jobs apart, and join a script that "
            "calls distcollect.run(main); or submit it without --worker-jobs"
        )
    address, port = listen_address(listen)
    if port and read_token() is None:
        raise ArgumentError(
            f"to let workers join at {address}:{port}, put a secret into a file that only you can "
            f"read and name it by {TOKEN_VARIABLE}, here and where they are started"
        )
    token = read_token() or secrets.token_hex(16)
    num_local = num_cores() if num_workers is None else num_workers
    return Cluster(address, token, num_local=num_local, port=port)


def listen_address(listen: str | None = None, default: str = LOOPBACK) -> tuple[str, int]:
    """Where to listen: by argument, by DISTCOLLECT_LISTEN, else ``default`` and any port (0).

    Raises:
        ArgumentError: it isn't "ADDRESS:PORT".
    """
    wanted = listen or os.environ.get(LISTEN)
    if not wanted:
        return default, 0
    name = "listen" if listen else LISTEN
    host, port = host_and_port(name, wanted)
    if not is_address(host):
        # What a host's own name stands for is often no address that others reach.
        raise ArgumentError(
            f"{name}={wanted!r}: {host!r} is no address; give that of this host on the network by "
            "which workers come, as in 10.0.0.5:29600"
        )
    return host, port


def host_and_port(name: str, text: str) -> tuple[str, int]:
    """The parts of "HOST:PORT" or "[HOST]:PORT".

    Raises:
        ArgumentError: it is something else.
    """
    host, colon, port = text.rpartition(":")
    if not (colon and host and port.isdigit() and 0 < int(port) < 2**16):
        raise ArgumentError(f"{name}={text!r}: must be HOST:PORT, as in 10.0.0.5:29600")
    return host.strip("[]"), int(port)


def read_token() -> str | None:
    """The secret that those who join have to show, as the user gave it; None: not at all.

    Raises:
        LaunchError: the file can't be read, is empty, or everybody may read it.
    """
    path = os.environ.get(TOKEN_VARIABLE)
    if path is None:
        return os.environ.get(_SECRET) or None
    try:
        with Path(path).open() as file:
            mode = os.fstat(file.fileno()).st_mode
            token = file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise LaunchError(
            f"{TOKEN_VARIABLE}={path}: the token can't be read ({why}); {_HOLDS_TOKEN}"
        ) from error
    if not token:
        raise LaunchError(f"{TOKEN_VARIABLE}={path}: the file is empty; {_HOLDS_TOKEN}")
    if mode & (stat.S_IRWXO | stat.S_IWGRP):
        raise LaunchError(
            f"{TOKEN_VARIABLE}={path}: others may read or change it ({stat.filemode(mode)}), so it "
            f"is no secret; make a new one, chmod 600 {shlex.quote(path)}"
        )
    if mode & stat.S_IRGRP:
        log.warning("%s=%s: its group may read it; is that meant?", TOKEN_VARIABLE, path)
    return token
