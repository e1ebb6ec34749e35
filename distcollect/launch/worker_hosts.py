"""Where worker processes are started: by this process, or by supervisors on other hosts."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Protocol

from distcollect.common import open_files
from distcollect.common.memory_segment import own_network
from distcollect.common.process_exit import ProcessExit
from distcollect.common.waiting import wait_for
from distcollect.errors import (
    FIRST_SERVER,
    ArgumentError,
    CollectorStateError,
    DeadlineError,
    LaunchError,
    is_server,
    slot_name,
)
from distcollect.launch.cpu_placement import Host, choose, may_pin
from distcollect.launch.local_processes import LocalProcesses, ProcessReport
from distcollect.net.messages import (
    Exited,
    Goodbye,
    Hello,
    Kill,
    MemoryExceeded,
    Message,
    Spawn,
    SupervisorHello,
    SupervisorWelcome,
    TrainerAddress,
)
from distcollect.net.server import Connection, JoinServer, JoinServerEvents
from distcollect.net.tls import trainer_tls

log = logging.getLogger(__name__)

_LATE_RANKS_TIMEOUT_S = 20.0
_DONE = Goodbye()


class HostEvents(JoinServerEvents):
    """What is reported about worker processes and the slots they are started in.

    The methods are called on several threads.
    """

    def reported(self, report: ProcessReport) -> None:
        """A process has ended, or takes more memory than it may; that is repeated while it does."""

    def slot_opened(self, worker_id: int) -> None:
        """Processes for this slot can be started from now on."""

    def slot_given_up(self, worker_id: int, reason: str) -> None:
        """The supervisor of this slot is not there, and will not come any more."""

    def slot_closed(self, worker_id: int) -> None:
        """No process for this slot can be started any more; a running one may go on."""


class PlacerSettings(Protocol):
    """What to ask another scheduler for."""

    def connect(self) -> Placer:
        """Connect to the scheduler.

        Raises:
            LaunchError: it can't be reached.
        """


class Placer(Protocol):
    """Has a scheduler start one supervisor for each slot, and start it again when it is lost.

    The supervisor for slot w joins as rank w + 1. The methods may be called on several threads.

    Attributes:
        address: this host's, on the network that it shares with the supervisors.
    """

    address: str

    def start(
        self,
        trainer: TrainerAddress,
        num_workers: int,
        supervised: Callable[[], Collection[int]],
        give_up: Callable[[int, str], None],
    ) -> None:
        """Request supervisors for the slots from 0 to ``num_workers`` - 1.

        Args:
            trainer: where they join.
            num_workers: see above.
            supervised: gives the slots whose supervisor has joined, and is there.
            give_up: called with a slot and the reason, on any thread, if no supervisor for that
                slot will come any more.

        Raises:
            LaunchError: the scheduler refuses.
        """

    @property
    def is_settled(self) -> bool:
        """Return True if no supervisor is expected soon: the missing ones wait for resources."""

    def missing(self) -> str:
        """Say which supervisors have not joined, and what they wait for; "" if none is missing."""

    def close(self) -> None:
        """End all supervisors. Again it does nothing."""


@dataclass
class _Supervisor:
    """A supervisor, from its welcome to its end; its processes end with its connection.

    Attributes:
        network: that of its host, see :class:`.SupervisorHello`.
        running: slots and incarnations of the processes that it was to start, and did not report as
            ended.
    """

    connection: Connection
    rank: int | None
    network: str
    running: set[tuple[int, int]] = field(default_factory=set)


class WorkerHosts(JoinServerEvents):
    """The hosts of a run, and how worker processes are started on them.

    Attributes:
        join_server: where workers and supervisors join.
        address: this host's, on the interface by which they reach it.
        token: what they have to know.
        end_collector: ends the collector that uses these hosts, if one does.
        local_hosts: this host alone, for collectors that start local workers within a launch.
        patience_s: how long to wait until enough workers have joined, if :attr:`is_elastic`.
        placer: has the expected workers started, the first ones at about one time; None: something
            else does.
    """

    def __init__(
        self,
        address: str,
        token: str,
        *,
        num_ranks: int | None = None,
        num_local: int = 0,
        num_expected: int | None = None,
        patience_s: float = 0.0,
        placer: Placer | None = None,
        port: int = 0,
        security: str | None = None,
    ) -> None:
        """Listen on ``address``, if others than local workers may join.

        Args:
            address: see above.
            token: what every process that joins has to know.
            num_ranks: worker ranks of the launch: rank r's supervisor has slot r - 1. None: there
                is no launch.
            num_local: slots, from 0, whose processes this process starts itself.
            num_expected: how many workers are expected to join by themselves, at any time; None:
                none.
            patience_s: see above.
            placer: see above; for one collector.
            port: to listen on; 0: any that is free.
            security: see :func:`~distcollect.net.tls.check_security`.

        Raises:
            ArgumentError: this process may not open enough files for so many workers.
            LaunchError: see :func:`~distcollect.net.interfaces.listen` and
                :func:`~distcollect.net.tls.trainer_tls`.
        """
        open_files.fill_standard_streams()
        open_files.raise_limit()
        num_others = max(num_ranks or 0, num_expected or 0)
        short = open_files.shortage(num_local, are_local=True)
        if short := short or open_files.shortage(num_others, are_local=False):
            raise ArgumentError(short)
        self.address = address
        self.token = token
        self.patience_s = patience_s
        self.local_hosts: weakref.WeakSet[WorkerHosts] = weakref.WeakSet()
        self._num_expected = num_expected
        self.placer = placer
        self._num_ranks = num_ranks
        self._num_local = num_local
        host, pin = Host.inspect(), may_pin(os.environ)
        self._placements = [choose(host, i, num_local, may_pin=pin) for i in range(num_local)]
        self._num_wanted = 0
        self._server_ranks: Collection[int] | None = None
        self._networks: list[str] = []  # of the hosts that had workers, in the order of their slots
        self._is_in_use = False
        self._events = HostEvents()
        self.end_collector: Callable[[], object] = lambda: None
        self._supervisors: dict[int, _Supervisor] = {}  # by slot
        self._seen: set[int] = set()  # slots of ranks that have joined, even if they are gone now
        self._local: LocalProcesses | None = None
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        # Local workers are given their connections; a port is for others.
        others_join = num_ranks is not None or num_expected is not None or port or not num_local
        if others_join:
            tls = trainer_tls(address, security)
            self.join_server = JoinServer(address, token, self, port, tls=tls)
        else:
            self.join_server = JoinServer(None, token, self)
        self._trainer = TrainerAddress(address, self.join_server.port, token)

    @property
    def is_elastic(self) -> bool:
        """Return True if workers come and go at any time, so that the trainer waits for enough."""
        return self._num_expected is not None

    @property
    def supervised(self) -> list[int]:
        """The slots whose processes a supervisor starts."""
        with self._lock:
            return sorted(self._supervisors)

    def missing(self) -> str:
        """Return why expected workers may not be there, in words."""
        if self.placer is None:
            return "are their jobs still queued? 'distcollect status' shows that"
        return self.placer.missing() or "they have joined, and their processes ended"

    def num_workers(self, wanted: int | None) -> int:
        """Return how many workers a collector gets if it asks for ``wanted`` (None: all there are).

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

    def claim(self) -> None:
        """Serve no other collector until :meth:`detach`.

        Raises:
            CollectorStateError: a collector has them.
        """
        with self._lock:
            if self._is_in_use:
                raise CollectorStateError(
                    "another collector is open, and has the workers of this launch; call its "
                    "shutdown() first, or take a MultiSyncDataCollector or MultiaSyncDataCollector,"
                    " which start workers of their own on this host"
                )
            self._is_in_use = True

    def attach(
        self,
        events: HostEvents,
        num_workers: int,
        timeout_s: float,
        end: Callable[[], object] = lambda: None,
        server_ranks: Collection[int] | None = None,
    ) -> None:
        """Serve one collector: report to ``events``. Wait until its slots can be used.

        Args:
            events: see above.
            num_workers: slots, from 0, that are needed.
            timeout_s: for the ranks of the launch to join.
            end: ends the collector; called when the trainer's ``main()`` is done.
            server_ranks: open a slot for an inference server on the hosts of these ranks; empty: on
                each host that has workers. None: on no host.

        Raises:
            DeadlineError: ranks of the launch did not join in time.
        """
        self._num_wanted = num_workers
        self._events = events
        self.end_collector = end
        self._server_ranks = server_ranks
        if self._num_local:
            self._local = LocalProcesses(events.reported)
            self._open_server(own_network(), None)

        def missing() -> list[int]:
            awaited = range(self._num_local, num_workers)
            return [i + 1 for i in awaited if i not in self._supervisors]

        def remind(elapsed_s: float) -> None:
            log.warning(
                "waiting for ranks %s to join, for %.0f s so far, at most %g s",
                missing(), elapsed_s, timeout_s,
            )  # fmt: skip

        with self._lock:
            if not wait_for(self._changed, lambda: not missing(), timeout_s, remind):
                raise DeadlineError(
                    f"ranks {missing()} did not join within {timeout_s:g} s: look at their own "
                    "output. Does every rank call distcollect.run(main)? 'distcollect "
                    "doctor' looks at the way between hosts"
                )
            wanted = {w: each for w, each in self._supervisors.items() if self._is_wanted(w)}
        for worker_id, supervisor in wanted.items():
            self._open_server(supervisor.network, supervisor.rank)
            events.slot_opened(worker_id)
        if self.placer is not None:
            num_expected = self._num_expected or 0
            self.placer.start(
                self._trainer, num_expected, lambda: self.supervised, events.slot_given_up
            )

    def _open_server(self, network: str, rank: int | None) -> None:
        """A host has workers: it gets a server, unless other ranks' hosts have them."""
        if self._gives_server(rank):
            self._events.slot_opened(self._server_of(network))

    def server_for(self, worker_id: int) -> tuple[int | None, bool]:
        """The slot of the inference server that a worker asks, and whether on another host."""
        if self._server_ranks is None or is_server(worker_id):
            return None, False
        with self._lock:
            supervisors = [each for _, each in sorted(self._supervisors.items())]
            serving = (each.network for each in supervisors if self._gives_server(each.rank))
            networks = list(dict.fromkeys(serving))
            own = self._supervisors.get(worker_id)
            network = own_network() if own is None else own.network
            if not networks or own is None or network in networks:
                return self._server_of(network), False
            return self._server_of(networks[worker_id % len(networks)]), True

    def _gives_server(self, rank: int | None) -> bool:
        """Return True if the host of a supervisor with this rank gets an inference server by it."""
        ranks = self._server_ranks
        return ranks is not None and (not ranks or rank in ranks)

    def _server_of(self, network: str) -> int:
        """The slot of a host's server."""
        with self._lock:
            if network not in self._networks:
                self._networks.append(network)
            return FIRST_SERVER + self._networks.index(network)

    def _supervisor_for(self, worker_id: int) -> _Supervisor | None:
        """The one that starts processes in a slot; None: this process does, or nobody."""
        if not is_server(worker_id):
            return self._supervisors.get(worker_id)
        if self._is_local(worker_id):
            return None
        network = self._networks[worker_id - FIRST_SERVER]
        return next((s for s in self._supervisors.values() if s.network == network), None)

    def _is_local(self, worker_id: int) -> bool:
        """Return True if this process starts the processes in a slot that has no supervisor."""
        if is_server(worker_id):
            return self._num_local > 0 and worker_id == self._server_of(own_network())
        return worker_id < self._num_local

    def _is_wanted(self, worker_id: int) -> bool:
        """Return True if the collector uses this slot; surplus ranks of the launch are not used."""
        return worker_id < self._num_wanted or worker_id >= (self._num_ranks or 0)

    def spawn(self, wanted: Spawn) -> None:
        """Start a process in a slot.

        Raises:
            LaunchError: the slot has no supervisor.
        """
        worker_id = wanted.worker_id
        with self._lock:
            supervisor = self._supervisor_for(worker_id)
            if supervisor is not None:
                supervisor.running.add((worker_id, wanted.incarnation))
                supervisor.connection.send(wanted)
                return
        if self._local is None or not self._is_local(worker_id):
            raise LaunchError(f"the supervisor of {slot_name(worker_id)} is gone")
        control = self.join_server.connect()
        # A server leaves its place, to take what its workers leave of the host.
        placement = self._placements[0 if is_server(worker_id) else worker_id]
        self._local.spawn(wanted, self._trainer, placement, control)

    def kill(self, worker_id: int, incarnation: int, why: str = "") -> None:
        """End a process at once; do nothing if it has ended. Its host logs ``why``."""
        for supervisor in list(self._supervisors.values()):
            if (worker_id, incarnation) in supervisor.running:
                supervisor.connection.send(Kill(worker_id, incarnation, why))
        if self._local is not None:
            self._local.kill(worker_id, incarnation)

    def end_processes(self, grace_s: float) -> None:
        """Wait up to ``grace_s`` for all processes to end by themselves, then kill them."""
        if self._local is not None:
            self._local.close(grace_s)
        with self._lock:
            if self._await_ends(grace_s):
                return
            for supervisor in self._supervisors.values():
                for worker_id, incarnation in supervisor.running:
                    name = slot_name(worker_id)
                    log.warning("%s did not end within %g s: killing it", name, grace_s)
                    self.kill(worker_id, incarnation, f"it did not end within {grace_s:g} s")
            self._await_ends(grace_s)

    def _await_ends(self, timeout_s: float) -> bool:
        """Wait until supervisors run no processes; return False if it took too long."""
        supervisors = self._supervisors.values
        return self._changed.wait_for(lambda: not any(s.running for s in supervisors()), timeout_s)

    def detach(self, *, failed: bool = False) -> None:
        """The collector is closed, another one may come; without a launch the supervisors end.

        ``failed``: because of an error.
        """
        self._events = HostEvents()
        self.end_collector = lambda: None
        self._server_ranks = None
        self._local = None
        with self._lock:
            for supervisor in self._supervisors.values():
                supervisor.running.clear()
            self._is_in_use = False
        if self._num_ranks is None and (self.placer is not None or not self.is_elastic):
            self._end_supervisors(_DONE, Goodbye(failed))
        if self.placer is not None:
            self.placer.close()

    def close(self, ranks: Goodbye = _DONE, joined: Goodbye = _DONE) -> None:
        """End the supervisors: the trainer is done.

        It waits a little for ranks that have not joined yet: else they would look for a trainer
        that is gone.

        Args:
            ranks: for the ranks of its launch.
            joined: for supervisors that joined by themselves.
        """
        # First, while the supervisors are there to end its processes.
        for hosts in (self, *self.local_hosts):
            hosts.end_collector()
        with self._lock:
            if self._num_ranks is not None:
                self._changed.wait_for(
                    lambda: len(self._seen) == self._num_ranks, _LATE_RANKS_TIMEOUT_S
                )
        self._end_supervisors(ranks, joined)

    def _end_supervisors(self, ranks: Goodbye, joined: Goodbye) -> None:
        for supervisor in list(self._supervisors.values()):
            supervisor.connection.send(ranks if supervisor.rank else joined)
        self.join_server.close()

    def admit(self, connection: Connection) -> Message | None:
        if not isinstance(connection.hello, SupervisorHello):
            return self._events.admit(connection)
        rank = connection.hello.rank
        with self._lock:
            worker_id = self._slot_for(rank)
            connection.send(SupervisorWelcome(worker_id))
            before = self._supervisors.get(worker_id)
            network = connection.hello.network
            self._supervisors[worker_id] = _Supervisor(connection, rank, network)
            if rank:
                self._seen.add(worker_id)
            self._changed.notify_all()
        # Its processes ended with its old connection, which still seems open.
        if before is not None:
            self._is_gone(worker_id, before)
        if self._is_wanted(worker_id):
            self._open_server(network, rank)
            self._events.slot_opened(worker_id)
        return None

    def _slot_for(self, rank: int | None) -> int:
        """A rank's own slot; otherwise the first one that nobody starts processes for."""
        if rank:
            return rank - 1
        awaited = set(range(self._num_ranks or 0)) - self._seen
        placed = range(0 if self.placer is None else self._num_expected or 0)
        taken = {*self._supervisors, *awaited, *placed}
        return next(i for i in range(self._num_local, 2**31) if i not in taken)

    def refused(self, hello: Hello | None, reason: str) -> None:
        self._events.refused(hello, reason)

    def received(self, connection: Connection, message: Message) -> None:
        if not isinstance(connection.hello, SupervisorHello):
            self._events.received(connection, message)
            return
        worker_id = self._slot_of(connection)
        if worker_id is None:
            return
        # Reported before it is removed: end_processes() returns when the last one is removed, and
        # what was reported by then is accounted for.
        if isinstance(message, Exited | MemoryExceeded):
            self._events.reported(message)
        if isinstance(message, Exited):
            with self._lock:
                running = self._supervisors[worker_id].running
                running.discard((message.worker_id, message.incarnation))
                self._changed.notify_all()

    def closed(self, connection: Connection) -> None:
        if not isinstance(connection.hello, SupervisorHello):
            self._events.closed(connection)
            return
        with self._lock:
            worker_id = self._slot_of(connection)
            if worker_id is None:
                return
            supervisor = self._supervisors.pop(worker_id)
            self._changed.notify_all()
        self._is_gone(worker_id, supervisor)

    def _is_gone(self, worker_id: int, supervisor: _Supervisor) -> None:
        """A supervisor is gone, and its processes end; another one on its host starts a server."""
        if self._is_wanted(worker_id):
            self._events.slot_closed(worker_id)
        gone = ProcessExit(-1, 0, "the supervisor that started it is gone")
        for server, incarnation in filter(lambda key: is_server(key[0]), supervisor.running):
            self._events.reported(Exited(server, incarnation, gone))
        if not self._gives_server(supervisor.rank):
            return
        server = self._server_of(supervisor.network)
        with self._lock:
            has_starter = self._is_local(server) or self._supervisor_for(server) is not None
        if not has_starter:
            self._events.slot_closed(server)

    def _slot_of(self, connection: Connection) -> int | None:
        """The slot of a supervisor; None if it has connected anew already."""
        slots = (w for w, each in self._supervisors.items() if each.connection is connection)
        return next(slots, None)
