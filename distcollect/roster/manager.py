"""The worker processes of one collector, as the collector starts, uses and ends them."""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from functools import partial

from distcollect.common.peer_ids import identity
from distcollect.common.waiting import wait_for
from distcollect.config import Faults
from distcollect.engine.pickled_plan import PickledPlan
from distcollect.errors import CollectorStateError, DeadlineError, LaunchError, WorkerError
from distcollect.launch.open_hosts import WantedHosts, open_hosts
from distcollect.results import WorkerState
from distcollect.roster.interfaces import MembershipObserver
from distcollect.roster.lifecycle import EXIT_TIMEOUT_S, Lifecycle
from distcollect.roster.membership import PRESENT
from distcollect.roster.status import RunPhase, Status
from distcollect.transport.start import exposure, start_transport

log = logging.getLogger(__name__)

# Hundreds of workers are pinged at hundreds of instants; handled together they cost less. But many
# checks are made in the time after which a silent worker is lost.
_CHECK_PERIOD_S, _CHECKS_PER_SILENCE = 0.25, 40

_open_numbers: set[int] = set()  # of collectors
_numbering = threading.Lock()


def _number() -> int:
    """The lowest number, from 1, that no open collector has."""
    with _numbering:
        if not _open_numbers:
            identity().restart_traj_ids()
        number = next(i for i in itertools.count(1) if i not in _open_numbers)
        _open_numbers.add(number)
        return number


class Workers:
    """The workers of one collector, from their start to their end.

    The user's thread calls the methods. A thread of its own, the supervision thread, runs the
    :class:`~.lifecycle.Lifecycle`; what both need is in a :class:`~.status.Status`.

    Attributes:
        transport: reaches the workers.
        address: this host's, on the interface by which workers reach it.
        worker_infos: what the first process in each slot found when it was probed, by worker_id.
        processes: pid and host of the newest process that was ready, by worker_id.
        gpus: the name of the GPU that has each worker's policy, "" for the CPU; kept up to date.
        ends: how lost workers ended.
        report, drained: see :class:`.FailureSink`.
        failed: whether they are closed because of an error; None: nobody closed them, so the
            script's end did.
    """

    def __init__(
        self,
        num_workers: int | None,
        faults: Faults,
        plan_for: Callable[[int], PickledPlan],
        *,
        hosts: WantedHosts,
        transport: str = "rpc",
        server_ranks: Collection[int] | None = None,
        evaluating: Collection[int] = (),
    ) -> None:
        """Start the workers, and wait until all have joined and were probed.

        Args:
            num_workers: None: all that the launch provides, or one for each core.
            faults: the timeouts.
            plan_for: worker_id to its plan.
            hosts: where to start them.
            transport: the name of the transport.
            server_ranks: start an inference server on the hosts of these ranks; empty: on each host
                that has workers. None: on no host.
            evaluating: ids of the workers that collect nothing.

        Raises:
            ArgumentError: the launch has fewer workers.
            CollectorStateError: another collector uses the workers of the launch.
            DistCollectError: some did not join, or failed. Nothing is left running then.
        """
        self._faults = faults
        self.failed: bool | None = None
        self._status = Status(evaluating)
        self.worker_infos = self._status.worker_infos
        self.processes = self._status.processes
        self.ends = self._status.ends
        self._posted: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="distcollect-workers", daemon=True)
        self._steps = contextlib.ExitStack()  # of close(), the last one first
        at_end = self._steps.callback
        limit_s, half_s = faults.start_timeout_s, faults.stop_timeout_s / 2
        try:
            number = _number()
            at_end(_open_numbers.discard, number)
            self._hosts = open_hosts(num_workers, hosts, limit_s)
            # The hosts can serve another collector now.
            at_end(lambda: self._hosts.detach(failed=self._has_failed()))
            # Workers that join by themselves have no fixed number: none in particular has to come.
            count = 0 if self._hosts.is_elastic else self._hosts.num_workers(num_workers)
            self._num_first = count
            self.address = self._hosts.address
            for sentence in exposure(transport, self.address, self._hosts.join_server):
                log.info("%s", sentence)
            self.transport = start_transport(transport, self.address, self._hosts.token)
            at_end(self.transport.close)  # again: an exception may have ended the first one early
            self._lifecycle = Lifecycle(
                self._hosts,
                self.transport,
                faults,
                plan_for,
                self._status,
                num_first=count,
                post=self._posted.put,
                collector=number,
            )
            self.gpus = self._lifecycle.gpus
            self.report, self.drained = self._lifecycle.report, self._lifecycle.drained
            # All ends are reported by now; the thread accounts for them, and ends.
            at_end(self._end_thread)
            # Half of the time is for their end. What remains then is killed, and all are reaped.
            at_end(self._hosts.end_processes, half_s)
            at_end(self._lifecycle.exit_workers)
            # The other half is for the answers that they still owe. The trainer's agent closes
            # before they end: else it would log a warning for each connection that breaks.
            at_end(self.transport.close, half_s)
            # Workers stop stepping, and close their envs.
            at_end(self._lifecycle.stop_workers)
            self._hosts.attach(self._lifecycle, count, limit_s, self.close, server_ranks)
            self._thread.start()
            self._await_start()
        except BaseException:
            self.close()
            raise

    @property
    def states(self) -> dict[int, WorkerState]:
        """Return what is known of each slot's worker, by worker_id."""
        return dict(sorted(self._status.states.items()))

    @property
    def num_present(self) -> int:
        """Return how many workers serve requests."""
        return self._status.num_present

    @property
    def is_elastic(self) -> bool:
        """Return True if workers come and go at any time, so that the trainer waits for enough."""
        return self._hosts.is_elastic

    @property
    def has_enough(self) -> bool:
        """Return True if ``min_workers`` collect, or none in particular has to."""
        return not self.is_elastic or self._status.num_collecting >= self._faults.min_workers

    def attach(self, observer: MembershipObserver) -> None:
        """Report to ``observer`` from now on; first the workers that are there."""
        done: Future[None] = Future()
        self._lifecycle.observe(observer)
        self._posted.put(partial(done.set_result, None))
        done.result(self._faults.start_timeout_s)

    def release(self, worker_ids: Sequence[int]) -> None:
        """Have workers leave for good, and wait until they have.

        Raises:
            DeadlineError: some did not end in time; names them.
        """
        for worker_id in worker_ids:
            self._lifecycle.leave(worker_id)
        limit_s = self._faults.leave_timeout_s + self._faults.stop_timeout_s

        def staying() -> list[int]:
            states = self._status.states
            return [w for w in worker_ids if states.get(w) is not WorkerState.LEFT]

        if not wait_for(self._status.changed, lambda: not staying(), limit_s):
            raise DeadlineError(
                f"workers {staying()} did not leave within {limit_s:g} s: a step or close() of "
                "their envs may hang; Faults(leave_timeout_s=..., stop_timeout_s=...) gives longer"
            )

    def await_enough(self) -> None:
        """If workers join and leave at any time, wait until ``min_workers`` are there.

        Raises:
            DeadlineError: they did not join in time.
            DistCollectError: the run can't go on.
        """
        least, limit_s = self._faults.min_workers, self._hosts.patience_s
        status = self._status
        if self.has_enough:
            return
        # A scheduler that starts them needs seconds, and says itself what it waits for.
        level = logging.INFO if self._hosts.placer is not None else logging.WARNING
        log.log(
            level,
            "waiting up to %g s for workers: %d there, %d wanted",
            *(limit_s, status.num_collecting, least),
        )
        if not self._await_joins(lambda: self.has_enough, limit_s):
            raise DeadlineError(
                f"waited {limit_s:g} s for workers to join at {self.address}: "
                f"{status.num_collecting} of at least {least} (Faults.min_workers) are there; "
                f"{self._hosts.missing()}"
            )

    def _await_joins(
        self,
        is_done: Callable[[], bool],
        limit_s: float,
        remind: Callable[[float], object] = lambda _: None,
    ) -> bool:
        """Wait up to ``limit_s``, False if it took longer; ``remind``: see :func:`.wait_for`.

        Raises:
            DistCollectError: it keeps workers from joining.
        """

        def is_over() -> bool:
            if self._status.failure is not None:
                raise self._status.failure
            if self._status.is_stopping:
                raise CollectorStateError("the launch ended while workers were awaited")
            return is_done()

        return wait_for(self._status.changed, is_over, limit_s, remind)

    def _await_start(self) -> None:
        """Wait until the first process in every slot is ready, and one at least."""
        status, limit_s = self._status, self._faults.start_timeout_s
        deadline = time.monotonic() + limit_s + EXIT_TIMEOUT_S
        if self.is_elastic:
            self.await_enough()
        remaining = max(0.0, deadline - time.monotonic())
        if self.is_elastic:  # the others join later
            self._await_joins(self._have_started, remaining)
        elif not self._await_joins(self._have_started, remaining, self._lifecycle.report_start):
            missing = [w for w in status.states if w not in status.worker_infos]
            names = f"workers {missing}" if missing else "a worker"
            raise DeadlineError(
                f"waited {limit_s:g} s for {names} to join, without success: see their own output; "
                "Faults(start_timeout_s=...) gives longer, 'distcollect doctor' looks at the way "
                "between hosts"
            )
        status.enter(RunPhase.RUNNING)

    def _have_started(self) -> bool:
        """Return True if the workers that the first batch should come from are ready."""
        ready, states = self._status.worker_infos, self._status.states
        if not self.is_elastic:
            return all(states.get(w) in PRESENT for w in range(max(1, self._num_first)))
        if self._hosts.placer is None:
            return True
        # Those that a scheduler can start now: with fewer, the first batches would depend on which
        # of them was faster. One that failed is replaced, and joins later.
        ended = self._status.ends.known()
        return self._hosts.placer.is_settled and all(
            w in ready or w in ended for w in self._hosts.supervised
        )

    def close(self) -> None:
        """End all workers and reap them; again it does nothing."""
        self._status.enter(RunPhase.STOPPING)
        # Each step is done once, and even if one before it raised, as by a Ctrl-C. A further call,
        # from another thread too, does the steps that remain.
        self._steps.close()

    def _has_failed(self) -> bool:
        if self.failed is None:
            # Set by an exception that ended the script; where the user types, by any exception.
            self.failed = hasattr(sys, "last_value") and not hasattr(sys, "ps1")
        return self.failed or self._status.failure is not None

    # The supervision thread.

    def _run(self) -> None:
        period_s = min(_CHECK_PERIOD_S, self._faults.silence_timeout_s / _CHECKS_PER_SILENCE)
        checked_at = 0.0
        while True:
            now = time.monotonic()
            due = max(self._lifecycle.next_check(now), checked_at + period_s)
            # Python can't wait for much longer than an hour at once; a check in between does no
            # harm.
            pause_s = min(due - now, 3600.0)
            with contextlib.suppress(queue.Empty):
                while True:
                    event = self._posted.get(timeout=max(0.0, pause_s))
                    if event is None:
                        return
                    self._guarded(event)
                    pause_s = 0.0  # handle all other events, then check
            checked_at = time.monotonic()
            self._guarded(self._lifecycle.check)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except LaunchError as error:  # no more processes can be started
            self._lifecycle.fail(error)
        except Exception as error:
            log.exception("the supervision of the workers failed")
            self._lifecycle.fail(WorkerError(f"the supervision of the workers failed: {error!r}"))

    def _end_thread(self) -> None:
        if self._thread.is_alive():
            self._posted.put(self._lifecycle.account_for_rest)
            self._posted.put(None)
            if self._thread is not threading.current_thread():  # as a collector's finalizer may be
                self._thread.join(5)
