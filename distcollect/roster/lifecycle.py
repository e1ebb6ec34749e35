"""What happens to the worker processes of a collector, from their start to the ledger's account.

Everything here runs on the supervision thread. It handles the posted events in order, which note
what has happened. After them :meth:`Lifecycle.check` looks at all workers, asks :mod:`.membership`
what follows, does it, and reports to the pool.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from typing import Any

from distcollect.common.peer_ids import identity
from distcollect.common.process_exit import ProcessExit
from distcollect.common.shared_memory import sample_of_memory
from distcollect.common.threads import posted
from distcollect.config import Faults
from distcollect.engine.pickled_plan import PickledPlan
from distcollect.errors import (
    DistCollectError,
    EnvError,
    LaunchError,
    WorkerError,
    WorkerLost,
    WorkerMismatch,
    is_server,
    slot_name,
)
from distcollect.launch.local_processes import ProcessReport
from distcollect.launch.worker_hosts import HostEvents, WorkerHosts
from distcollect.net.messages import (
    Exit,
    Exited,
    Hello,
    Leaving,
    Message,
    Reachable,
    Refused,
    Spawn,
    Stop,
    SupervisorHello,
    WorkerHello,
    WorkerSettings,
    WorkerWelcome,
    worker_name,
)
from distcollect.net.server import Connection
from distcollect.results import WorkerState
from distcollect.roster.interfaces import MembershipObserver
from distcollect.roster.membership import PRESENT, Membership, MembershipCommand, Ping, Start
from distcollect.roster.plans import PlanSender
from distcollect.roster.process import Process, ProcessKey, message_of, mismatch, start_report
from distcollect.roster.status import Status, WorkerEnd
from distcollect.transport.protocol import Transport
from distcollect.transport.start import TCP
from distcollect.transport.worker_service import WorkerInfo, WorkerService

log = logging.getLogger(__name__)

# From the end of a worker's connection until it is reported how its process ended. A host that has
# vanished reports nothing.
EXIT_TIMEOUT_S = 2.0


class Lifecycle(HostEvents):
    """Starts, probes, watches, replaces and ends worker processes.

    What the hosts and the pool report, on many threads, is posted to the supervision thread. Only
    :meth:`admit` answers at once.

    Attributes:
        post: has the supervision thread call a function.
        processes: those that are not accounted for yet.
        gpus: worker_id to the name of the GPU that has its policy, "" for the CPU.
    """

    def __init__(
        self,
        hosts: WorkerHosts,
        transport: Transport,
        faults: Faults,
        plan_for: Callable[[int], PickledPlan],
        status: Status,
        *,
        num_first: int,
        post: Callable[[Callable[[], None]], None],
        collector: int = 1,
    ) -> None:
        """Nothing is started before :meth:`check`.

        Args:
            hosts: where processes are started.
            transport: reaches them.
            faults: the timeouts.
            plan_for: worker_id to its plan.
            status: shared with the user's thread.
            num_first: slots, from 0, whose first processes all have to become ready.
            post: has the supervision thread call a function.
            collector: the number of its collector among those that are open in this process.
        """
        self._hosts = hosts
        self._transport = transport
        self._faults = faults
        self._plan_for = plan_for
        self._status = status
        self._num_first = num_first
        self.post = post
        self._collector = collector
        self._plan_sender = PlanSender(transport, post)
        timeouts_s = faults.silence_timeout_s, faults.start_timeout_s
        restarts = faults.max_restarts, faults.restart_pause_s
        self._membership = Membership(*timeouts_s, *restarts, status.evaluating)
        self._observer = MembershipObserver()
        self._is_observed = False
        # Slots for which no supervisor will come, and why.
        self._given_up: dict[int, str] = {}
        self._answered: deque[ProcessKey] = deque()  # processes that answered a ping
        self.processes: dict[ProcessKey, Process] = {}
        self.gpus: dict[int, str] = {}
        for worker_id in range(num_first):
            self._membership.open(worker_id, time.monotonic())
        status.states = self._membership.states

    def next_check(self, now: float) -> float:
        """By when to call :meth:`check`, unless an event comes first."""
        due = (process.account_by for process in self.processes.values())
        return min(self._membership.next_tick(now), min(due, default=math.inf))

    def check(self) -> None:
        """Do what follows from the events so far, and what is due."""
        now = time.monotonic()
        while self._answered:
            self._membership.heard(*self._answered.popleft(), now)
        if self._replaces:
            for command in self._membership.tick(now):
                self._do(command)
        for process in list(self.processes.values()):
            if process.is_over and (process.exit is not None or now >= process.account_by):
                self._account(process)
        self._publish()

    @property
    def _replaces(self) -> bool:
        """Return True if processes are started, and watched."""
        if self._status.failure is not None or self._status.is_stopping:
            return False
        # What is wrong with one of the first processes is wrong with the run. It fails once it is
        # known how that one ended.
        return not self._status.is_starting or not any(
            process.is_over and self._is_first(process.worker_id)
            for process in self.processes.values()
        )

    def _is_first(self, worker_id: int) -> bool:
        """Return True if the first process in this slot has to become ready."""
        return worker_id < self._num_first or (is_server(worker_id) and self._num_first > 0)

    def _publish(self) -> None:
        with self._status.lock:
            self._status.states = self._membership.states
            self._status.changed.notify_all()

    def _do(self, command: MembershipCommand) -> None:
        if isinstance(command, Start):
            self._start(command.worker_id, command.incarnation)
            return
        process = self.processes[command.worker_id, command.incarnation]
        if isinstance(command, Ping):
            self._ping(process)
        else:
            phase = self._membership.phase(process.worker_id)
            limit_s = self._faults.start_timeout_s
            process.failure = process.failure or process.overdue(phase, command.reason, limit_s)
            self._lose(process)

    # Starting and probing.

    def _start(self, worker_id: int, incarnation: int) -> None:
        over_rpc = self._transport.name != TCP
        process = Process(worker_id, incarnation, identity().new_peer(), over_rpc)
        self.processes[process.key] = process
        # Torch's C++ side logs a warning for each peer whose process ends; that is reported anyhow.
        env = {"TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")}
        settings = WorkerSettings(
            collector=self._collector,
            first_traj_id=identity().workers_first_traj_id,
            leave_timeout_s=self._faults.leave_timeout_s,
            start_timeout_s=self._faults.start_timeout_s,
            step_timeout_s=self._faults.step_timeout_s,
            max_bytes=None if is_server(worker_id) else self._faults.max_worker_bytes,
        )
        try:
            self._hosts.spawn(Spawn(worker_id, incarnation, settings, env))
        except LaunchError as error:
            process.exit = ProcessExit(-1, 0, f"it could not be started: {error}")
            self._lose(process)
        if self._status.is_stopping:  # stop_workers() may have found no process to kill yet
            self._hosts.kill(*process.key)

    def admit(self, connection: Connection) -> Message:
        process = self._claimed_by(connection)
        if process is None or process.connection is not None or process.is_over:
            return Refused("there is no free slot for it")
        process.connection = connection
        transport = self._transport
        # Local workers get their connections from this process: for them, nothing listens.
        listens = transport.name == TCP and identity().num_trainers > 1 and not connection.is_own
        return WorkerWelcome(process.peer, sample_of_memory(), transport.name, listens)

    def _claimed_by(self, connection: Connection) -> Process | None:
        hello = connection.hello
        if not isinstance(hello, WorkerHello):
            return None
        return self.processes.get((hello.worker_id, hello.incarnation))

    def received(self, connection: Connection, message: Message) -> None:
        process = self._claimed_by(connection)
        if process is None or process.connection is not connection:
            return
        if isinstance(message, Reachable):
            self._connect(process, message)
        elif isinstance(message, Leaving):
            self.leave(process.worker_id)

    @posted
    def closed(self, connection: Connection) -> None:
        process = self._claimed_by(connection)
        if process is not None and process.connection is connection:
            self._lose(process)

    @posted
    def refused(self, hello: Hello | None, reason: str) -> None:
        if hello is None:
            log.warning("refused a process that wanted to join: %s", reason)
            return
        log.warning("refused a %s from %s: %s", hello.role, hello.host, reason)
        process = None
        if isinstance(hello, WorkerHello):
            worker_id = hello.worker_id
            process = self.processes.get((hello.worker_id, hello.incarnation))
        elif isinstance(hello, SupervisorHello) and hello.rank:
            worker_id = hello.rank - 1
        else:
            return  # no slot was meant for it
        message = f"can't work with this trainer: {reason} (host {hello.host})"
        error = WorkerMismatch(message, worker_id=worker_id)
        if process is not None:
            process.failure = error
            self._lose(process)
        elif self._status.is_starting:
            self.fail(error)

    @posted
    def _connect(self, process: Process, message: Reachable) -> None:
        """A process can be reached: have it make and try out its envs and policy."""
        if self._status.is_stopping or not self._membership.joined(*process.key):
            return
        self._transport.connect(process.peer, message.address, process.connection)
        self._name_servers([process])
        plan = self._plan_for(process.worker_id)
        self._plan_sender.send(process.peer, plan, partial(self._probed, process))

    @posted
    def _probed(self, process: Process, answer: Future[WorkerInfo]) -> None:
        if (error := answer.exception()) is not None:
            self._fail_process(process, error)
            return
        info = answer.result()
        if mismatched := mismatch(info, self._status.worker_infos.values()):
            self._fail_process(process, WorkerMismatch(mismatched, worker_id=process.worker_id))
            return
        if not self._membership.ready(*process.key, time.monotonic()):
            return
        process.info = info
        self.gpus[process.worker_id] = info.gpu
        assert process.connection is not None
        hello = process.connection.hello
        with self._status.lock:
            self._status.worker_infos.setdefault(process.worker_id, info)
            self._status.processes[process.worker_id] = hello.pid, hello.host
        if self._is_observed:
            log.info("%s is ready%s", self._name(process.worker_id), process.where)
        self._observer.join(*process.key, process.peer, info.server)
        if info.socket:
            self._name_servers(self.processes.values())

    def _name_servers(self, workers: Iterable[Process]) -> None:
        """Tell workers where the inference server is that they ask, if it is ready."""
        for worker in workers:  # those that can't be reached yet are not told
            slot, is_remote = self._hosts.server_for(worker.worker_id)
            server = None if slot is None else self._current(slot)
            if server is not None and server.info is not None:
                place = server.info.endpoint if is_remote else server.info.socket
                self._transport.call(worker.peer, WorkerService.ask_server_at, place)

    @posted
    def observe(self, observer: MembershipObserver) -> None:
        """Report to ``observer`` from now on; first the workers that are there."""
        self._observer, self._is_observed = observer, True
        if self._status.failure is not None:
            observer.fail(self._status.failure)
        for worker_id, state in self._membership.states.items():
            if state is WorkerState.JOINING:
                observer.lose(worker_id, -1, replaced=True)
        for process in list(self.processes.values()):
            if process.info is not None and not process.is_over:
                log.info("%s is ready%s", self._name(process.worker_id), process.where)
                observer.join(*process.key, process.peer, process.info.server)

    @posted
    def report_start(self, elapsed_s: float) -> None:
        """Log which of the first processes are awaited."""
        phases = [self._membership.phase(worker_id) for worker_id in range(self._num_first)]
        current = {p.worker_id: p for p in self.processes.values() if not p.is_over}
        log.warning(start_report(phases, current, elapsed_s, self._faults.start_timeout_s))

    # Watching.

    def _ping(self, process: Process) -> None:
        def answered(answer: Future[Any]) -> None:
            if answer.exception() is None:
                # Not posted: the next check is early enough, and waking the thread costs time.
                self._answered.append(process.key)

        self._transport.ping(process.peer).add_done_callback(answered)

    @posted
    def report(
        self, worker_id: int, incarnation: int, error: BaseException, *, is_final: bool = False
    ) -> None:
        """A worker failed at a request: it is replaced, unless the error ``is_final``."""
        process = self.processes.get((worker_id, incarnation))
        if process is not None:
            process.ends_run |= is_final  # its other calls fail as it is lost
            self._fail_process(process, error)

    def _fail_process(self, process: Process, error: BaseException) -> None:
        if process.is_over or self._status.is_stopping:
            return
        if not isinstance(error, DistCollectError):
            error = WorkerError(repr(error), worker_id=process.worker_id)
        if getattr(error, "is_permanent", False) and not isinstance(error, EnvError):
            # If it did not get ready where others did, something may be wrong with its host.
            process.ends_run = process.info is not None or not self._status.worker_infos
        if not isinstance(error, WorkerLost):  # else how its process ended says more
            process.failure = error
        self._lose(process)

    # Slots, and leaving in order.

    @posted
    def slot_opened(self, worker_id: int) -> None:
        self._membership.open(worker_id, time.monotonic())

    @posted
    def leave(self, worker_id: int) -> None:
        """A worker is to leave for good, once it owes the pool nothing."""
        self._membership.leave(worker_id, self._faults.leave_timeout_s, time.monotonic())
        process = self._current(worker_id)
        if process is None:
            self._check_vacant(worker_id, "it was released")
        elif process.info is None or not self._is_observed:
            self._lose(process)
        else:
            self._drain(process)

    @posted
    def reported(self, report: ProcessReport) -> None:
        process = self.processes.get((report.worker_id, report.incarnation))
        if process is None:
            return
        if isinstance(report, Exited):
            process.exit = report.exit
            self._lose(process)
        elif self._drain(process):  # else it is not ready, or the pool isn't there yet
            worker_id, took = process.worker_id, f"{report.num_bytes / 1e9:.2f} GB of memory"
            process.is_retired = True
            process.failure = WorkerLost(f"it was retired, as it took {took}", worker_id=worker_id)
            limit = self._faults.max_worker_bytes
            log.warning(
                "%s takes %s, more than Faults(max_worker_bytes=%s): it is replaced after its "
                "rollout",
                *(self._name(worker_id), took, limit),
            )

    def _drain(self, process: Process) -> bool:
        if not self._is_observed or not self._membership.drain(*process.key):
            return False
        self._observer.leave(*process.key)
        return True

    @posted
    def drained(self, worker_id: int, incarnation: int) -> None:
        """A process that is to leave owes the pool nothing any more."""
        limit_s = self._faults.leave_timeout_s
        if self._membership.drained(worker_id, incarnation, limit_s, time.monotonic()):
            connection = self.processes[worker_id, incarnation].connection
            assert connection is not None
            connection.send(Stop())
            connection.send(Exit())

    @posted
    def slot_closed(self, worker_id: int) -> None:
        self._membership.close(worker_id)
        process = self._current(worker_id)
        if process is None:
            self._check_vacant(worker_id, "the supervisor that started its processes is gone")
        elif process.connection is None:
            self._lose(process)  # its supervisor may have ended before it started the process

    @posted
    def slot_given_up(self, worker_id: int, reason: str) -> None:
        self._given_up[worker_id] = reason
        if self._status.is_stopping:
            return
        if self._status.is_starting:
            self.fail(LaunchError(reason))
            return
        # Else the end of its process is still to be told, with this reason.
        if all(process.worker_id != worker_id for process in self.processes.values()):
            log.warning("%s is not replaced: %s", self._name(worker_id), reason)
        if fatal := self._fatal(worker_id, WorkerLost(reason, worker_id=worker_id)):
            self.fail(fatal)

    def _check_vacant(self, worker_id: int, reason: str) -> None:
        """A slot has no process; if none is going to be started, report that."""
        if self._membership.state(worker_id) not in (WorkerState.LOST, WorkerState.LEFT):
            return
        self._observer.lose(worker_id, -1, replaced=False)
        if fatal := self._fatal(worker_id, WorkerLost(reason, worker_id=worker_id)):
            self.fail(fatal)

    def _current(self, worker_id: int) -> Process | None:
        """The process in a slot."""
        return next(
            (p for p in self.processes.values() if p.worker_id == worker_id and not p.is_over), None
        )

    # Ending, expected or not.

    def _lose(self, process: Process) -> None:
        """The process has ended, or is ignored from now on whatever it does."""
        now, worker_id = time.monotonic(), process.worker_id
        phase = self._membership.phase(worker_id)
        if not self._membership.ended(*process.key, now):
            return
        process.ended_in = phase
        process.account_by = now + EXIT_TIMEOUT_S
        why = "" if process.failure is None else message_of(process.failure)
        self._hosts.kill(*process.key, why)
        if process.connection is not None:
            process.connection.close()
        self._transport.disconnect(process.peer)
        joins = self._membership.state(worker_id) is WorkerState.JOINING
        self._observer.lose(*process.key, replaced=joins and not self._status.is_stopping)

    def _account(self, process: Process) -> None:
        """Report the end of a lost process, and decide whether the run can go on."""
        del self.processes[process.key]
        worker_id = process.worker_id
        left = self._membership.state(worker_id) is WorkerState.LEFT
        stopping = self._status.is_stopping
        failure, cause = process.death(left=left), process.cause(left=left, stopping=stopping)
        self._publish()  # first: who waits for ends looks at the states
        self._status.ends.note(worker_id, WorkerEnd(failure, is_hang=cause == "hung"))
        stepped = None if process.exit is None else process.exit.stepped
        self._observer.account(*process.key, cause, stepped)
        if stopping:
            return
        if self._status.is_starting and self._is_first(worker_id):
            self.fail(failure)
            return
        fatal = failure if process.ends_run else self._fatal(worker_id, failure)
        if left:
            log.info("%s has left%s", self._name(process.worker_id), process.where)
        elif not process.is_retired:
            outlook = "the run ends" if fatal else self._outlook(worker_id)
            name = self._name(worker_id)
            log.warning("%s is lost: %s; %s", name, message_of(failure), outlook)
        if fatal is not None:
            self.fail(fatal)

    def _name(self, worker_id: int) -> str:
        return worker_name(worker_id, self._collector)

    def _outlook(self, worker_id: int) -> str:
        delay_s = self._membership.delay(worker_id, time.monotonic())
        if self._membership.state(worker_id) in PRESENT:
            return "it was replaced"
        if self._membership.state(worker_id) is not WorkerState.JOINING:
            if self._hosts.placer is not None and worker_id not in self._given_up:
                return "it is replaced once Ray has started its actor again"
            reason = self._given_up.get(worker_id)
            return "it is not replaced" + (f": {reason}" if reason else "")
        return "it is replaced" + (f" in {delay_s:.1f} s" if delay_s else "")

    def _fatal(self, worker_id: int, failure: DistCollectError) -> DistCollectError | None:
        """The error by which the run ends, as it can't go on without this worker; None: it can."""
        least, hopeful = self._faults.min_workers, self._membership.num_hopeful
        if is_server(worker_id):  # without one, its workers can do nothing
            return failure if self._membership.is_given_up(worker_id) else None
        works = self._status.num_present or not self._status.is_starting
        may_recover = self._faults.max_env_faults and works and hopeful >= least
        if isinstance(failure, EnvError) and not may_recover:
            return failure
        if self._hosts.placer is not None:
            gone = {*self._given_up, *self._status.evaluating}
            hopeful = max(hopeful, self._hosts.num_workers(None) - len(gone))
        if hopeful >= least or (self._hosts.is_elastic and self._hosts.placer is None):
            return None
        ends = {w: message_of(end.error) for w, end in self._status.ends.known().items()}
        deaths = sorted((ends | self._given_up).items())
        others = [f"{slot_name(w)}: {d}" for w, d in deaths if w != worker_id]
        before = f"; before that {'; '.join(others)}" if others else ""
        why = self._given_up.get(worker_id) or message_of(failure)
        return WorkerLost(
            f"{why}; {hopeful} worker(s) left to collect, at least {least} wanted "
            f"(Faults.min_workers){before}",
            worker_id=worker_id,
        )

    def fail(self, error: DistCollectError) -> None:
        """The run can't go on."""
        self._status.fail(error)
        self._observer.fail(error)

    # Ending all; the first two run on the thread that closes the collector.

    def stop_workers(self) -> None:
        """Have all workers stop stepping and close their envs."""
        self._send_all(Stop())
        for process in list(self.processes.values()):
            if process.connection is None:  # it has not joined, and owes nothing
                self._hosts.kill(*process.key)

    def exit_workers(self) -> None:
        """Have all worker processes end."""
        self._send_all(Exit())

    def _send_all(self, message: Message) -> None:
        for process in list(self.processes.values()):
            if process.connection is not None:
                process.connection.send(message)

    def account_for_rest(self) -> None:
        """Account also for ready workers whose end nobody reported, as their hosts are cut off."""
        for process in list(self.processes.values()):
            if process.info is not None:
                process.account_by = 0.0
                process.ended_in = process.ended_in or self._membership.phase(process.worker_id)
        self.check()
