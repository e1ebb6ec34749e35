"""What happens to the worker processes of a collector, from their start to the ledger's account.

Everything here runs on the supervision thread: it handles the posted events in order, asks
:mod:`.membership` what follows, does it, and reports to the pool.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from distcollect.common.due_times import DueTimes
from distcollect.common.process_exit import ProcessExit
from distcollect.config import Faults
from distcollect.engine.pickled_plan import PickledPlan
from distcollect.errors import (
    DistCollectError,
    EnvError,
    LaunchError,
    PolicyError,
    WorkerError,
    WorkerLost,
    WorkerMismatch,
)
from distcollect.launch.worker_hosts import WorkerHosts
from distcollect.net.messages import (
    Exit,
    Hello,
    Message,
    Reachable,
    Stop,
    SupervisorHello,
    WorkerHello,
    WorkerSettings,
    worker_name,
)
from distcollect.results import WorkerState
from distcollect.roster.interfaces import MembershipObserver
from distcollect.roster.membership import PRESENT, Command, Membership, Ping, Start
from distcollect.roster.plans import PlanSender
from distcollect.roster.process import Key, Process, ProcessState, message_of
from distcollect.roster.status import Status
from distcollect.roster.worker_ends import WorkerEnd
from distcollect.transport.peer_ids import identity
from distcollect.transport.protocol import Transport
from distcollect.transport.worker_service import WorkerInfo

log = logging.getLogger(__name__)

# From the end of a worker's connection until it is reported how its process ended. A host that has
# vanished reports nothing.
EXIT_TIMEOUT_S = 2.0


class Lifecycle:
    """Starts, probes, watches, replaces and ends worker processes.

    Attributes:
        processes: those that are not accounted for yet.
        gpus: worker_id to the name of the GPU that has its policy, "" for the CPU.
        are_near: whether all workers so far are on this host, and share memory with the trainer.
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
        self._post = post
        self._collector = collector
        self._plan_sender = PlanSender(transport, post)
        self._membership = Membership(
            faults.silence_timeout_s,
            faults.start_timeout_s,
            faults.max_restarts,
            faults.restart_pause_s,
        )
        self._observer: MembershipObserver | None = None
        self._deaths: dict[int, str] = {}
        self._given_up: set[int] = set()  # slots for which no supervisor will come
        self._answered: deque[Key] = deque()  # processes that answered a ping
        self._deadlines: DueTimes[Key] = DueTimes()
        self.processes: dict[Key, Process] = {}
        self.gpus: dict[int, str] = {}
        self.are_near = True
        for worker_id in range(num_first):
            self._membership.open(worker_id, time.monotonic())
        status.states = self._membership.states

    # The supervision thread's work, at regular times.

    def next_check(self, now: float) -> float:
        """By when to call :meth:`check`, unless an event comes first."""
        return min(self._membership.next_tick(now), self._deadlines.first)

    def check(self) -> None:
        """Do what is due."""
        now = time.monotonic()
        while self._answered:
            self._membership.heard(*self._answered.popleft(), now)
        if self._status.starts_processes:
            for command in self._membership.tick(now):
                self._do(command)
        for key in self._deadlines.take(now):
            process = self.processes.get(key)
            if process is None:
                continue
            if process.is_over:
                self._account(process)
            else:
                self.lose(process)
        with self._status.lock:
            self._status.states = self._membership.states
            self._status.changed.notify_all()

    def _do(self, command: Command) -> None:
        if isinstance(command, Start):
            self._start(command.worker_id, command.incarnation)
            return
        process = self.processes[command.worker_id, command.incarnation]
        if isinstance(command, Ping):
            self._ping(process)
        else:
            process.failure = process.overdue(command.reason, self._faults.start_timeout_s)
            self.lose(process)

    # Starting and probing.

    def _start(self, worker_id: int, incarnation: int) -> None:
        try:
            process = Process(worker_id, incarnation, identity().new_peer())
        except LaunchError as error:
            self.fail(error)
            return
        self.processes[process.key] = process
        # Torch's C++ side logs a warning for each peer whose process ends; that is reported anyhow.
        env = {"TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")}
        settings = WorkerSettings(
            collector=self._collector,
            first_traj_id=identity().workers_first_traj_id,
            leave_timeout_s=self._faults.leave_timeout_s,
            step_timeout_s=self._faults.step_timeout_s,
            max_bytes=self._faults.max_worker_bytes,
        )
        try:
            self._hosts.spawn(worker_id, incarnation, settings, env)
        except (OSError, LaunchError) as error:
            process.exit = ProcessExit(-1, 0, f"it could not be started: {error}")
            self.lose(process)
        if self._status.is_stopping:  # stop_workers() may have found no process to kill yet
            self._hosts.kill(*process.key)

    def refused(self, hello: Hello, message: str) -> None:
        """A process with other versions than the trainer's was refused."""
        process = None
        if isinstance(hello, WorkerHello):
            worker_id = hello.worker_id
            process = self.processes.get((hello.worker_id, hello.incarnation))
        elif isinstance(hello, SupervisorHello) and hello.rank:
            worker_id = hello.rank - 1
        else:
            return  # no slot was meant for it
        error = WorkerMismatch(message, worker_id=worker_id)
        if process is not None:
            process.failure = error
            self.lose(process)
        elif self._status.is_starting:
            self.fail(error)

    def connect(self, process: Process, message: Reachable) -> None:
        """A process can be reached: have it make and try out its envs and policy."""
        if process.state is not ProcessState.STARTED or self._status.is_stopping:
            return
        self._transport.connect(process.peer, message.address)
        process.enter(ProcessState.PROBING)
        self.are_near &= self._transport.shares_memory(process.peer)
        plan = self._plan_for(process.worker_id)
        probed = partial(self._probed, process)
        self._plan_sender.send(process.peer, plan, lambda it: self._post(partial(probed, it)))

    def _probed(self, process: Process, answer: Future[WorkerInfo]) -> None:
        error = answer.exception()
        if error is not None:
            self._fail_process(process, error)
            return
        probe = answer.result()
        first = next(iter(self._status.probes.values()), probe)
        if (probe.layout, probe.weights) != (first.layout, first.weights):
            message = f"its frames or weights differ from the others': {probe} instead of {first}"
            self._fail_process(process, PolicyError(message, worker_id=process.worker_id))
            return
        if process.is_over:
            return
        process.probe = probe
        process.enter(ProcessState.READY)
        self.gpus[process.worker_id] = probe.gpu
        self._membership.ready(*process.key, time.monotonic())
        with self._status.lock:
            self._status.probes.setdefault(process.worker_id, probe)
        if self._observer is not None:
            log.info("%s is ready%s", self._name(process), process.where)
            self._observer.join(process.worker_id, process.incarnation, process.peer)

    def observe(self, observer: MembershipObserver) -> None:
        """Report to ``observer`` from now on; first the workers that are there."""
        self._observer = observer
        if self._status.failure is not None:
            observer.fail(self._status.failure)
        for worker_id, state in self._membership.states.items():
            if state is WorkerState.JOINING:
                observer.lose(worker_id, -1, replaced=True)
        for process in list(self.processes.values()):
            if process.probe is not None and not process.is_over:
                observer.join(process.worker_id, process.incarnation, process.peer)

    # Watching.

    def _ping(self, process: Process) -> None:
        def answered(answer: Future[Any]) -> None:
            if answer.exception() is None:
                # Not posted: the next check is early enough, and waking the thread costs time.
                self._answered.append(process.key)

        self._transport.ping(process.peer).add_done_callback(answered)

    def failed(self, key: Key, error: BaseException, *, is_final: bool = False) -> None:
        """A worker failed at a request: it is replaced, unless the error ``is_final``."""
        process = self.processes.get(key)
        if process is not None:
            process.ends_run |= is_final  # its other calls fail as it is lost
            self._fail_process(process, error)

    def _fail_process(self, process: Process, error: BaseException) -> None:
        if process.is_over or self._status.is_stopping:
            return
        if isinstance(error, WorkerLost):
            pass  # how its process ended says more
        elif isinstance(error, DistCollectError):
            process.failure = error
        else:
            process.failure = WorkerError(repr(error), worker_id=process.worker_id)
        self.lose(process)

    # Slots, and leaving in order.

    def open_slot(self, worker_id: int) -> None:
        """Processes can be started in a slot from now on."""
        self._membership.open(worker_id, time.monotonic())

    def leave(self, worker_id: int) -> None:
        """A worker is to leave for good, once it owes the pool nothing."""
        now = time.monotonic()
        self._membership.leave(worker_id, self._faults.leave_timeout_s, now)
        process = self._current(worker_id)
        if process is None:
            self._check_vacant(worker_id, "it was released")
        elif process.probe is None or self._observer is None:
            self.lose(process)
        else:
            self._drain(process)

    def retire(self, key: Key, num_bytes: int) -> None:
        """A process takes too much memory: it is replaced after its rollout."""
        process = self.processes.get(key)
        # If it isn't ready, or the pool isn't there yet, this is reported again later.
        if process is None or process.state is not ProcessState.READY or self._observer is None:
            return
        log.warning(
            "%s takes %.2f GB of memory, more than Faults(max_worker_bytes=%s): it is replaced "
            "after its rollout",
            self._name(process),
            num_bytes / 1e9,
            self._faults.max_worker_bytes,
        )
        process.is_retired = True
        process.failure = WorkerLost(
            f"it was retired, as it took {num_bytes / 1e9:.2f} GB of memory",
            worker_id=process.worker_id,
        )
        self._drain(process)

    def _drain(self, process: Process) -> None:
        if process.state is ProcessState.READY:
            assert self._observer is not None
            process.enter(ProcessState.DRAINING)
            self._observer.leave(*process.key)

    def drained(self, key: Key) -> None:
        """A process that is to leave owes the pool nothing any more."""
        process = self.processes.get(key)
        if process is None or process.state is not ProcessState.DRAINING:
            return
        process.enter(ProcessState.EXITING, time.monotonic() + self._faults.leave_timeout_s)
        self._deadlines.set(key, process.deadline)
        assert process.connection is not None
        process.connection.send(Stop())
        process.connection.send(Exit())

    def close_slot(self, worker_id: int) -> None:
        """No process can be started in a slot any more."""
        self._membership.close(worker_id)
        process = self._current(worker_id)
        if process is None:
            self._check_vacant(worker_id, "the supervisor that started its processes is gone")
        elif process.connection is None:
            self.lose(process)  # its supervisor may have ended before it started the process

    def give_up_slot(self, worker_id: int, reason: str) -> None:
        """The scheduler of the workers will not start a slot's supervisor any more."""
        self._deaths[worker_id] = reason
        self._given_up.add(worker_id)
        if self._status.is_stopping:
            return
        if self._status.is_starting:
            self.fail(LaunchError(reason))
            return
        least, num_slots = self._faults.min_workers, self._hosts.num_workers(None)
        log.warning("%s is not replaced: %s", worker_name(worker_id, self._collector), reason)
        if max(self._membership.num_hopeful, num_slots - len(self._given_up)) < least:
            message = f"{reason}; at least {least} wanted (Faults.min_workers)"
            self.fail(WorkerLost(message, worker_id=worker_id))

    def _check_vacant(self, worker_id: int, reason: str) -> None:
        """A slot has no process; if none is going to be started, report that."""
        if self._membership.state(worker_id) not in (WorkerState.LOST, WorkerState.LEFT):
            return
        if self._observer is not None:
            self._observer.lose(worker_id, -1, replaced=False)
        self._check_remaining(worker_id, WorkerLost(reason, worker_id=worker_id))

    def _current(self, worker_id: int) -> Process | None:
        """The process in a slot that is not over."""
        return next(
            (p for p in self.processes.values() if p.worker_id == worker_id and not p.is_over), None
        )

    # Ending, expected or not.

    def lose(self, process: Process) -> None:
        """The process has ended, or is ignored from now on whatever it does."""
        now = time.monotonic()
        worker_id = process.worker_id
        if process.is_over or not self._membership.ended(*process.key, now):
            return
        process.enter(ProcessState.LOST, now + EXIT_TIMEOUT_S)
        self._deadlines.set(process.key, process.deadline)
        if worker_id < self._num_first:
            self._status.fail_start()
        self._hosts.kill(*process.key)
        if process.connection is not None:
            process.connection.close()
        self._transport.disconnect(process.peer)
        if self._observer is not None:
            joins = self._membership.state(worker_id) is WorkerState.JOINING
            self._observer.lose(*process.key, replaced=joins and not self._status.is_stopping)
        if process.exit is not None:
            self._account(process)

    def reaped(self, key: Key, process_exit: ProcessExit) -> None:
        """A process has ended, and it is known how."""
        process = self.processes.get(key)
        if process is None:
            return
        process.exit = process_exit
        self.lose(process)  # accounts for it, unless it was lost before
        if key in self.processes:
            self._account(process)

    def _account(self, process: Process) -> None:
        """Report the end of a lost process, and decide whether the run can go on."""
        process.enter(ProcessState.ACCOUNTED)
        del self.processes[process.key]
        self._deadlines.set(process.key, math.inf)
        worker_id = process.worker_id
        left = self._membership.state(worker_id) is WorkerState.LEFT
        failure = process.failure or process.death
        self._deaths[worker_id] = "it left" if left else message_of(failure)
        cause = process.cause(left=left)
        with self._status.lock:
            self._status.states = self._membership.states  # first: who waits for ends looks there
        self._status.ends.note(worker_id, WorkerEnd(failure, is_hang=cause == "hung"))
        stopping = self._status.is_stopping
        if self._observer is not None:
            cause = "shut_down" if stopping else cause
            stepped = None if process.exit is None else process.exit.stepped
            self._observer.account(*process.key, cause, stepped)
        if stopping:
            return
        if self._status.is_starting and worker_id < self._num_first:
            self.fail(failure)
            return
        is_fatal = process.ends_run or self._is_fatal(failure)
        if left:
            log.info("%s has left%s", self._name(process), process.where)
        elif not process.is_retired:
            outlook = "the run ends" if is_fatal else self._outlook(worker_id)
            log.warning("%s is lost: %s; %s", self._name(process), message_of(failure), outlook)
        if is_fatal:
            self.fail(failure)
        else:
            self._check_remaining(worker_id, failure)

    def _name(self, process: Process) -> str:
        return worker_name(process.worker_id, self._collector)

    def _outlook(self, worker_id: int) -> str:
        delay_s = self._membership.delay(worker_id, time.monotonic())
        if self._membership.state(worker_id) is not WorkerState.JOINING:
            if self._hosts.is_placed and worker_id not in self._given_up:
                return "it is replaced once its supervisor is started again"
            return "it is not replaced"
        return "it is replaced" + (f" in {delay_s:.1f} s" if delay_s else "")

    def _is_fatal(self, failure: DistCollectError) -> bool:
        """Whether the run ends though other workers remain."""
        if isinstance(failure, EnvError):
            return self._faults.max_env_faults == 0
        return isinstance(failure, PolicyError)  # all workers have the same policy

    def _check_remaining(self, worker_id: int, failure: DistCollectError) -> None:
        """Fail the run if it can't go on without this worker."""
        present = any(state in PRESENT for state in self._membership.states.values())
        hopeful, least = self._membership.num_hopeful, self._faults.min_workers
        if isinstance(failure, EnvError) and (not present or hopeful < least):
            self.fail(failure)
            return
        if hopeful < least and not self._hosts.is_elastic:
            others = [f"worker {w}: {d}" for w, d in sorted(self._deaths.items()) if w != worker_id]
            before = f"; before that {'; '.join(others)}" if others else ""
            self.fail(
                WorkerLost(
                    f"{message_of(failure)}; {hopeful} worker(s) left, at least {least} wanted "
                    f"(Faults.min_workers){before}",
                    worker_id=worker_id,
                )
            )

    def fail(self, error: DistCollectError) -> None:
        """The run can't go on."""
        self._status.fail(error)
        if self._observer is not None:
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
        """Account for ready workers whose end nobody reported, as their hosts are cut off."""
        for process in list(self.processes.values()):
            if process.probe is not None:
                if not process.is_over:
                    process.enter(ProcessState.LOST)
                self._account(process)
