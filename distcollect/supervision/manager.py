"""Drives the worker processes of one collector: starts, tries out, watches and replaces them.

What happens comes from many threads (the gate's, those that reap processes, torch's, the user's)
and is queued; one thread takes it in order, asks :mod:`.membership` what follows, and does it. It
tells the pool who is there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from distcollect.common.shared_memory import Segment
from distcollect.common.threads import LOOK_UP_S
from distcollect.config import Faults
from distcollect.engine.build import Probe
from distcollect.errors import (
    CollectorStateError,
    DeadlineError,
    DistCollectError,
    EnvError,
    LaunchError,
    PolicyError,
    WorkerError,
    WorkerLost,
    WorkerMismatch,
)
from distcollect.launch.local_processes import End
from distcollect.launch.preemption import exit_if_requested
from distcollect.launch.worker_hosts import Cluster, ClusterEvents, open_cluster
from distcollect.net.framing import Message
from distcollect.net.server import Connection
from distcollect.results import WorkerState as State
from distcollect.supervision.interfaces import MembershipObserver
from distcollect.supervision.membership import PRESENT, Command, Membership, Overdue, Ping, Start
from distcollect.supervision.process import Process, cause_of, death_of, message_of
from distcollect.transport.peer_ids import identity
from distcollect.transport.rpc import RpcTransport

log = logging.getLogger(__name__)

# Between the end of a worker's connection and the word of whoever reaps it. A host that has
# vanished has nobody to say it.
_EXIT_TIMEOUT_S = 2.0

# Hundreds of workers are pinged at hundreds of instants; together they cost less.
_LOOK_PERIOD_S = 0.05

_in_use = threading.Lock()


class Workers(ClusterEvents):
    """The workers of one collector, from their start to their end.

    Attributes:
        transport: reaches them.
        probes: worker_id to what the first process in each slot found when it was tried out.
        gpus: worker_id to a name of the GPU that has its policy, "" for the CPU; kept up to date.
        address: this host's, on the interface by which they reach it.
        first_traj_id: of this trainer's trajectories.
        are_near: whether all that ever came are on this host.
    """

    def __init__(
        self,
        num_workers: int | None,
        faults: Faults,
        plan_for: Callable[[int], bytes],
        listen: str | None = None,
        local: bool = False,
    ) -> None:
        """Start them, and wait until all have joined and were tried out.

        Args:
            num_workers: None: all that the launch provides, or one for each core.
            faults: how long to wait for whom.
            plan_for: worker_id to its pickled :class:`~distcollect.engine.build.WorkerPlan`.
            listen: "HOST:PORT" where further workers may join.
            local: on this host, whatever the launch provides.

        Raises:
            ArgumentError: the launch doesn't have as many.
            CollectorStateError: another collector is open.
            DistCollectError: they didn't all come, or failed. Nothing is left running then.
        """
        if not _in_use.acquire(blocking=False):
            raise CollectorStateError(
                "another collector is open in this process; call its shutdown() first (or use "
                "it in a with block)"
            )
        self._faults = faults
        self._plan_for = plan_for
        self._membership = Membership(
            faults.silence_timeout_s,
            faults.start_timeout_s,
            faults.max_restarts,
            faults.restart_pause_s,
        )
        self._processes: dict[tuple[int, int], Process] = {}
        self._deaths: dict[int, str] = {}
        self._observer: MembershipObserver | None = None
        self._failure: DistCollectError | None = None
        self._states: dict[int, State] = {}
        self._closing = False
        self._started = False  # all were ready once
        self._doomed = False  # starting more processes makes no sense
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._alive: deque[tuple[int, int]] = deque()  # processes that answered a ping
        self._posted: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.probes: dict[int, Probe] = {}
        self.gpus: dict[int, str] = {}
        self.are_near = True
        with contextlib.ExitStack() as undo:
            undo.callback(_in_use.release)
            self._cluster: Cluster = open_cluster(num_workers, listen, local=local)
            undo.callback(self._cluster.release)
            # Nobody in particular has to come where all come by themselves.
            count = 0 if self._cluster.gathers else self._cluster.num_workers(num_workers)
            self._num_first = count
            self.address = self._cluster.address
            self.first_traj_id = self._cluster.first_traj_id
            self.transport = RpcTransport(identity().trainer, address=self.address)
            undo.callback(self.transport.close)
            undo.callback(self._end_thread)
            for worker_id in range(count):
                self._membership.open(worker_id, time.monotonic())
            self._states = self._membership.states
            # Half of the grace is for what they still owe, half for their end.
            undo.callback(self._cluster.end_processes, faults.stop_timeout_s / 2)
            # Workers stop, and answer what they still owe, but end only when the trainer's agent
            # has: else it would log a warning for each connection that breaks.
            undo.callback(self._tell_all, {"bye": True})
            undo.callback(self.transport.close, faults.stop_timeout_s / 2)
            undo.callback(self._stop)
            self._cluster.attach(self, count, faults.start_timeout_s)
            self._thread = threading.Thread(target=self._run, name="distcollect-workers")
            self._thread.daemon = True
            self._thread.start()
            self._wait_ready()
            self._started = True
            self._undo = undo.pop_all()

    @property
    def states(self) -> dict[int, State]:
        """What is known of each slot's worker, by worker_id."""
        return dict(self._states)

    @property
    def num_present(self) -> int:
        """Workers that are there."""
        return sum(state in PRESENT for state in self._states.values())

    def attach(self, crew: MembershipObserver) -> None:
        """Report to ``crew`` from now on; first who is there."""
        done: Future[None] = Future()

        def take_over() -> None:
            self._observer = crew
            if self._failure is not None:
                crew.fail(self._failure)
            for worker_id, state in self._membership.states.items():
                if state is State.JOINING:
                    crew.lose(worker_id, -1, replaced=True)
            for process in list(self._processes.values()):
                if process.probe is not None and not process.is_over:
                    crew.join(process.worker_id, process.incarnation, process.peer)
            done.set_result(None)

        self._post(take_over)
        done.result(self._faults.start_timeout_s)

    def report(self, worker_id: int, incarnation: int, error: BaseException) -> None:
        """A worker failed at what it was asked for: it is replaced, if that can help."""
        self._post(partial(self._failed, (worker_id, incarnation), error))

    def drained(self, worker_id: int, incarnation: int) -> None:
        """A worker that is to leave owes nothing any more."""
        self._post(partial(self._dismiss, (worker_id, incarnation)))

    def release(self, worker_ids: Sequence[int]) -> None:
        """Have workers leave for good; wait until they have.

        Raises:
            DeadlineError: they did not end in time; names them.
        """
        for worker_id in worker_ids:
            self._post(partial(self._leave, worker_id))
        limit_s = self._faults.leave_timeout_s + self._faults.stop_timeout_s

        def staying() -> list[int]:
            return [w for w in worker_ids if self._states.get(w) is not State.LEFT]

        deadline = time.monotonic() + limit_s
        with self._lock:
            while staying():
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise DeadlineError(
                        f"workers {staying()} did not leave within {limit_s:g} s: a step or "
                        "close() of their envs may hang; Faults(leave_timeout_s=..., "
                        "stop_timeout_s=...) gives longer"
                    )
                self._changed.wait(min(remaining, LOOK_UP_S))

    def close(self) -> None:
        """End all workers and reap them. Again is no error."""
        self._undo.close()

    # What the cluster reports, on its threads.

    def admit(self, connection: Connection) -> Message:
        """See :class:`~distcollect.net.server.JoinServerEvents`."""
        process = self._processes.get(_claimed(connection.hello))
        if process is None or process.connection is not None or process.is_over:
            return {"refused": "there is no free slot for it"}
        process.connection = connection
        return {
            "peer": process.peer,
            "trainer_peer": identity().trainer,
            "trainer_endpoint": self.transport.endpoint,
        }

    def refused(self, hello: Message, reason: str) -> None:
        """See :class:`~distcollect.net.server.JoinServerEvents`."""
        log.warning("turned away a %s from %s: %s", hello.get("role"), hello.get("host"), reason)
        key = _claimed(hello)
        error = WorkerMismatch(
            f"can't work with this trainer: {reason} (host {hello.get('host')})", worker_id=key[0]
        )
        self._post(partial(self._mismatched, key, error))

    def received(self, connection: Connection, message: Message) -> None:
        """See :class:`~distcollect.net.server.JoinServerEvents`."""
        key = self._key_of(connection)
        if key is None:
            return
        if "endpoint" in message:
            self._post(partial(self._connect, key, message))
        elif "leaving" in message:
            self._post(partial(self._leave, key[0]))

    def closed(self, connection: Connection) -> None:
        """See :class:`~distcollect.net.server.JoinServerEvents`."""
        key = self._key_of(connection)
        if key is not None:
            self._post(partial(self._lost, key))

    def _key_of(self, connection: Connection) -> tuple[int, int] | None:
        """Whose lifeline it is; None for one that was turned away."""
        key = _claimed(connection.hello)
        process = self._processes.get(key)
        return key if process is not None and process.connection is connection else None

    def exited(self, worker_id: int, incarnation: int, end: End) -> None:
        """See :class:`~distcollect.launch.local_processes.ProcessEvents`."""
        self._post(partial(self._reaped, (worker_id, incarnation), end))

    def bloated(self, worker_id: int, incarnation: int, num_bytes: int) -> None:
        """See :class:`~distcollect.launch.local_processes.ProcessEvents`."""
        self._post(partial(self._retire, (worker_id, incarnation), num_bytes))

    def place_opened(self, worker_id: int) -> None:
        """See :class:`~distcollect.launch.worker_hosts.ClusterEvents`."""
        self._post(lambda: self._membership.open(worker_id, time.monotonic()))

    def place_lost(self, worker_id: int) -> None:
        """See :class:`~distcollect.launch.worker_hosts.ClusterEvents`."""
        self._post(partial(self._lose_place, worker_id))

    def launch_ended(self) -> None:
        """See :class:`~distcollect.launch.run.worker_hosts.ClusterEvents`."""
        self.close()

    # The rest runs on the workers' own thread, but for the waits of the user's.

    def _post(self, event: Callable[[], None] | None) -> None:
        self._posted.put(event)

    def _run(self) -> None:
        looked_at = 0.0
        while True:
            now = time.monotonic()
            ends = (p.due for p in list(self._processes.values()) if p.due is not None)
            due = min([self._membership.next_tick(now), *ends])
            # A lock can't be waited for much longer than this; nothing is due then in any case.
            pause_s = min(max(due, looked_at + _LOOK_PERIOD_S) - now, 3600.0)
            try:
                while True:
                    event = self._posted.get(timeout=max(0.0, pause_s))
                    if event is None:
                        return
                    self._guarded(event)
                    pause_s = 0.0  # take what else there is, then look
            except queue.Empty:
                pass
            looked_at = time.monotonic()
            self._guarded(self._look)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            log.exception("watching over the workers failed")
            self._fail(WorkerError(f"watching over the workers failed: {error!r}"))

    def _look(self) -> None:
        now = time.monotonic()
        while self._alive:
            self._membership.heard(*self._alive.popleft(), now)
        if not (self._closing or self._doomed):
            for command in self._membership.tick(now):
                self._do(command)
        for process in list(self._processes.values()):
            if process.due is None or process.due > now:
                continue
            if process.is_over:
                self._settle(process)
            else:
                self._lost(process.key)
        with self._lock:
            self._states = self._membership.states
            self._changed.notify_all()

    def _do(self, command: Command) -> None:
        key = (command.worker_id, command.incarnation)
        if isinstance(command, Start):
            self._start(*key)
            return
        process = self._processes[key]
        if isinstance(command, Ping):
            self._ping(process)
        else:
            self._end_overdue(process, command)

    def _start(self, worker_id: int, incarnation: int) -> None:
        process = Process(worker_id, incarnation, identity().new_peer())
        self._processes[process.key] = process
        # Torch's C++ side logs a warning for each peer whose process ends: no news here.
        env = {"TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")}
        boot = {
            "step_timeout_s": self._faults.step_timeout_s,
            "max_bytes": self._faults.max_worker_bytes,
            "leave_timeout_s": self._faults.leave_timeout_s,
        }
        try:
            self._cluster.spawn(worker_id, incarnation, boot, env)
        except (OSError, LaunchError) as error:
            process.end = End(-1, 0, f"it could not be started: {error}")
            self._lost(process.key)

    def _ping(self, process: Process) -> None:
        def answered(answer: Future[Any]) -> None:
            if answer.exception() is None:
                self._alive.append(process.key)  # nobody need wake up for that

        self.transport.ping(process.peer).add_done_callback(answered)

    def _end_overdue(self, process: Process, command: Overdue) -> None:
        limit_s = self._faults.start_timeout_s
        if process.probe is not None:
            process.failure = WorkerLost(
                command.reason + process.place, worker_id=process.worker_id
            )
        elif process.reachable:
            process.failure = DeadlineError(
                f"worker {process.worker_id} did not make and reset its envs within {limit_s:g} s; "
                "Faults(start_timeout_s=...) gives longer"
            )
        else:
            process.failure = DeadlineError(
                f"worker {process.worker_id} did not join within {limit_s:g} s; see its own output "
                "for what it was doing; Faults(start_timeout_s=...) gives longer"
            )
        self._lost(process.key)

    def _connect(self, key: tuple[int, int], message: Message) -> None:
        process = self._processes.get(key)
        if process is None or process.is_over or self._closing:
            return
        segment = message.get("segment")
        self.transport.connect(
            process.peer, message["endpoint"], Segment(**segment) if segment else None
        )
        process.reachable = True
        self.are_near &= self.transport.is_near(process.peer)
        answer: Future[Probe] = self.transport.call(
            process.peer, "configure", self._plan_for(process.worker_id)
        )
        answer.add_done_callback(lambda done: self._post(partial(self._tried_out, process, done)))

    def _tried_out(self, process: Process, answer: Future[Probe]) -> None:
        error = answer.exception()
        if error is not None:
            self._failed(process.key, error)
            return
        probe = answer.result()
        first = next(iter(self.probes.values()), probe)
        if (probe.layout, probe.weights) != (first.layout, first.weights):
            message = f"its frames or weights differ from the others': {probe} instead of {first}"
            self._failed(process.key, PolicyError(message, worker_id=process.worker_id))
            return
        if process.is_over:
            return
        process.probe = probe
        self.gpus[process.worker_id] = probe.gpu
        self._membership.ready(*process.key, time.monotonic())
        with self._lock:
            self.probes.setdefault(process.worker_id, probe)
        if self._observer is not None:
            log.info("worker %d is ready%s", process.worker_id, process.place)
            self._observer.join(process.worker_id, process.incarnation, process.peer)

    def _failed(self, key: tuple[int, int], error: BaseException) -> None:
        process = self._processes.get(key)
        if process is None or process.is_over or self._closing:
            return
        if isinstance(error, WorkerLost):
            pass  # the way its process ended says more
        elif isinstance(error, DistCollectError):
            process.failure = error
        else:
            process.failure = WorkerError(repr(error), worker_id=process.worker_id)
        self._lost(key)

    def _mismatched(self, key: tuple[int, int], error: WorkerMismatch) -> None:
        process = self._processes.get(key)
        if process is not None:
            process.failure = error
            self._lost(key)
        elif not self._started and key[0] >= 0:
            self._fail(error)

    def _leave(self, worker_id: int) -> None:
        now = time.monotonic()
        self._membership.leave(worker_id, self._faults.leave_timeout_s, now)
        process = self._running(worker_id)
        if process is None:
            self._vacant(worker_id, "it was released")
        elif process.probe is None or self._observer is None:
            self._lost(process.key)
        else:
            self._observer.leave(*process.key)

    def _retire(self, key: tuple[int, int], num_bytes: int) -> None:
        process = self._running(key[0])
        if process is None or process.key != key or process.retiring:
            return
        if process.probe is None or self._observer is None:
            return  # it is said again
        log.warning(
            "worker %d takes %.2f GB of memory, more than Faults(max_worker_bytes=%s): it is "
            "replaced after its rollout",
            process.worker_id,
            num_bytes / 1e9,
            self._faults.max_worker_bytes,
        )
        process.retiring = True
        process.failure = WorkerLost(
            f"it was retired, as it took {num_bytes / 1e9:.2f} GB of memory",
            worker_id=process.worker_id,
        )
        self._observer.leave(*key)

    def _dismiss(self, key: tuple[int, int]) -> None:
        process = self._processes.get(key)
        if process is not None and process.connection is not None:
            process.end_by = time.monotonic() + self._faults.leave_timeout_s
            process.connection.send({"stop": True})
            process.connection.send({"bye": True})

    def _lose_place(self, worker_id: int) -> None:
        self._membership.lose_place(worker_id)
        process = self._running(worker_id)
        if process is not None and process.connection is None:
            self._lost(process.key)  # nobody is left to start it
        elif process is None:
            self._vacant(worker_id, "whoever started its processes is gone")

    def _vacant(self, worker_id: int, reason: str) -> None:
        """Nobody is in a slot, and nobody comes."""
        if self._membership.state(worker_id) not in (State.LOST, State.LEFT):
            return
        if self._observer is not None:
            self._observer.lose(worker_id, -1, replaced=False)
        self._check_left(worker_id, WorkerLost(reason, worker_id=worker_id))

    def _running(self, worker_id: int) -> Process | None:
        return next(
            (
                process
                for process in self._processes.values()
                if process.worker_id == worker_id and not process.is_over
            ),
            None,
        )

    def _lost(self, key: tuple[int, int]) -> None:
        """Whatever it may still do, this process is heard no more."""
        process = self._processes.get(key)
        now = time.monotonic()
        if process is None or not self._membership.ended(*key, now):
            return
        process.account_by = now + _EXIT_TIMEOUT_S
        # The first ones have to come: what is wrong then is wrong with the run.
        self._doomed |= not self._started and key[0] < self._num_first
        self._cluster.kill(*key)
        if process.connection is not None:
            process.connection.close()
        self.transport.evict(process.peer)
        if self._observer is not None:
            replaced = self._membership.state(key[0]) is State.JOINING and not self._closing
            self._observer.lose(*key, replaced=replaced)
        if process.end is not None:
            self._settle(process)

    def _reaped(self, key: tuple[int, int], end: End) -> None:
        process = self._processes.get(key)
        if process is None:
            return
        process.end = end
        self._lost(key)
        if key in self._processes:
            self._settle(process)

    def _settle(self, process: Process) -> None:
        """Draw the line under a process that has ended."""
        del self._processes[process.key]
        worker_id = process.worker_id
        left = self._membership.state(worker_id) is State.LEFT
        failure = process.failure or death_of(process)
        self._deaths[worker_id] = "it left" if left else message_of(failure)
        if self._observer is not None:
            cause = "shut_down" if self._closing else cause_of(process, left=left)
            stepped = None if process.end is None else process.end.stepped
            self._observer.account(*process.key, cause, stepped)
        if self._closing:
            return
        if not self._started and worker_id < self._num_first:
            self._fail(failure)
            return
        if left:
            log.info("worker %d has left%s", worker_id, process.place)
        elif not process.retiring:
            outlook = self._outlook(worker_id)
            log.warning("worker %d is lost: %s; %s", worker_id, message_of(failure), outlook)
        self._check_left(worker_id, failure)

    def _settle_rest(self) -> None:
        """Draw the line under those of whom nobody says how they ended: their hosts are cut off."""
        for process in list(self._processes.values()):
            if process.probe is not None:
                self._settle(process)

    def _outlook(self, worker_id: int) -> str:
        delay_s = self._membership.delay(worker_id, time.monotonic())
        if self._membership.state(worker_id) is not State.JOINING:
            return "it is not replaced"
        return "it is replaced" + (f" in {delay_s:.1f} s" if delay_s else "")

    def _check_left(self, worker_id: int, failure: DistCollectError) -> None:
        """Give up when too few are left, or none and no new process would do better."""
        if isinstance(failure, PolicyError):
            self._fail(failure)  # all have the same policy
            return
        present = any(state in PRESENT for state in self._membership.states.values())
        hopeful, least = self._membership.num_hopeful, self._faults.min_workers
        if isinstance(failure, EnvError) and (not present or hopeful < least):
            self._fail(failure)
            return
        if hopeful < least and not self._cluster.gathers:
            others = [f"worker {w}: {d}" for w, d in sorted(self._deaths.items()) if w != worker_id]
            before = f"; before that {'; '.join(others)}" if others else ""
            self._fail(
                WorkerLost(
                    f"{message_of(failure)}; {hopeful} worker(s) left, at least {least} wanted "
                    f"(Faults.min_workers){before}",
                    worker_id=worker_id,
                )
            )

    def _fail(self, error: DistCollectError) -> None:
        self._doomed = True
        with self._lock:
            if self._failure is None:
                self._failure = error
            self._changed.notify_all()
        if self._observer is not None:
            self._observer.fail(error)

    def _wait_ready(self) -> None:
        """Wait for the first process in every slot; at least one in all."""
        if self._cluster.gathers:
            self.await_enough()
            return
        limit_s = self._faults.start_timeout_s
        deadline = time.monotonic() + limit_s + _EXIT_TIMEOUT_S
        with self._lock:
            while any(w not in self.probes for w in range(max(1, self._num_first))):
                if self._failure is not None:
                    raise self._failure
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    missing = [w for w in self._states if w not in self.probes]
                    awaited = f"workers {missing}" if missing else "a worker"
                    raise DeadlineError(
                        f"waited {limit_s:g} s for {awaited} to join, without success: see their "
                        "own output; "
                        "Faults(start_timeout_s=...) gives longer, 'distcollect doctor' looks at "
                        "the way between hosts"
                    )
                self._changed.wait(min(remaining, LOOK_UP_S))

    def await_enough(self) -> None:
        """Where workers come and go by themselves, wait until enough are there.

        Raises:
            DeadlineError: they didn't come in time.
            DistCollectError: the run can't go on.
        """
        least, limit_s = self._faults.min_workers, self._cluster.patience_s
        if not self._cluster.gathers or self.num_present >= least:
            return
        log.warning(
            "waiting up to %g s for workers: %d there, %d wanted", limit_s, self.num_present, least
        )
        deadline = time.monotonic() + limit_s
        while self.num_present < least:
            exit_if_requested()
            if self._failure is not None:
                raise self._failure
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise DeadlineError(
                    f"waited {limit_s:g} s for workers to join at {self.address}: "
                    f"{self.num_present} of at least {least} (Faults.min_workers) are there; "
                    "are their jobs still queued? 'distcollect status' tells"
                )
            with self._lock:
                self._changed.wait_for(
                    lambda: self.num_present >= least or self._failure is not None,
                    min(remaining, LOOK_UP_S),
                )

    @property
    def gathers(self) -> bool:
        """Whether workers come and go by themselves, so that too few are waited for."""
        return self._cluster.gathers

    def _stop(self) -> None:
        """Have all stop stepping and close their envs."""
        self._closing = True
        self._tell_all({"stop": True})
        for process in list(self._processes.values()):
            if process.connection is None:  # it has not joined, and owes nothing
                self._cluster.kill(*process.key)

    def _tell_all(self, message: Message) -> None:
        for process in list(self._processes.values()):
            if process.connection is not None:
                process.connection.send(message)

    def _end_thread(self) -> None:
        """Take what happened until now, and end."""
        if hasattr(self, "_thread"):
            self._post(self._settle_rest)
            self._post(None)
            self._thread.join(5)


def _claimed(hello: Message) -> tuple[int, int]:
    """Which worker and incarnation a peer says that it is."""
    return hello.get("worker_id", -1), hello.get("incarnation", -1)
