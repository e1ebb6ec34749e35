"""The trainer's side of all workers: requests rollouts from them, and gives batches to the user.

In sync mode rollouts are requested when the user asks for a batch: one of every worker. In async
mode each worker always has a request open, so that it collects the next rollout while the last one
is being fetched; rollouts are delivered first come, first served, unless staleness is bounded.

Workers come and go. What was requested from a worker that is gone is requested from another.

:class:`~.pool_core.PoolCore` decides all of it: each event is one call of it, and what it asks of
a worker is answered by another event. These are the parts; each knows only those below it, and all
from PoolCore on are pure::

    Pool            what the collector, the supervision and the sender of weights call
      EventLoop     the lock and the queue of events
    PoolCore        what the user waits for, what may be fetched, and what workers are asked
      Scheduler     which worker is asked next, and which rollout is delivered next
      Requests      where each rollout is that was requested, with the Ledger
      WorkerSlots   the workers
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Concatenate, ParamSpec

import torch

from distcollect.common import signals
from distcollect.common.clock import clock_ns
from distcollect.common.seeding import process_seeds
from distcollect.common.signals import Wakeup
from distcollect.common.waiting import missing
from distcollect.config import Staleness
from distcollect.errors import (
    BatchTimeout,
    CollectorStateError,
    DeadlineError,
    DistCollectError,
    WorkerError,
    WorkerLost,
    is_server,
)
from distcollect.pool.event_loop import EventLoop
from distcollect.pool.policy_lag import VersionFrames
from distcollect.pool.pool_core import PoolCore
from distcollect.pool.requests import origin
from distcollect.pool.setup_calls import SetupArguments, SetupCall
from distcollect.pool.staleness import SentVersions
from distcollect.pool.worker_slots import (
    BatchPlan,
    RolloutRequest,
    RolloutState,
    Wanted,
    WorkerSlot,
)
from distcollect.results import LedgerReport, WorkerThroughput
from distcollect.roster.interfaces import FailureSink, MembershipObserver
from distcollect.telemetry.recorder import StatsRecorder
from distcollect.transport.protocol import Transport
from distcollect.transport.worker_service import ResumeRequest, WorkerService
from distcollect.weights.push_handle import PushHandle
from distcollect.weights.sender import WeightSender

P = ParamSpec("P")

# At the end, for workers to say which of the rollouts that they keep were taken after all.
_TAKE_BACK_S = 2.0
# How many workers are asked where they are when a batch is late, and for how long.
_NUM_PLACES, _PLACES_S = 3, 2.0


class Pool(MembershipObserver):
    """Collects rollouts from workers, and sends weights before it requests rollouts.

    Attributes:
        version: policy_version of the newest publication.
        versions: which of them were sent to which worker.
        served_by: worker_id to the inference server that has its policy, of workers that have been
            there and don't have it themselves.
        on_weights: called with worker_id and version when a worker has joined and when it has
            acknowledged new weights; without the pool's lock.
    """

    def __init__(
        self,
        transport: Transport,
        sender: WeightSender,
        plan: BatchPlan,
        *,
        failure_sink: FailureSink,
        staleness: Staleness | None = None,
        stats_recorder: StatsRecorder | None = None,
        has_servers: bool = False,
        wait: Callable[[Wakeup, Callable[[], bool], float], bool] = Wakeup.wait_until,
    ) -> None:
        """Collect what ``plan`` says from the workers that :meth:`join` names.

        Args:
            transport: reaches the workers.
            sender: sends them weights.
            plan: what is to be collected.
            failure_sink: is told of workers that failed, or that owe nothing more and may leave.
            staleness: which frames are too old, and what becomes of them.
            stats_recorder: what to count in; None: counts are not kept.
            has_servers: the workers that collect have no policies of their own.
            wait: by which the user's threads wait: as :meth:`.Wakeup.wait_until`.
        """
        self.version = 0
        self.on_weights: Callable[[int, int], None] = lambda *_: None
        self._sender = sender
        self._plan = plan
        self._failure_sink = failure_sink
        self._stats_recorder = stats_recorder or StatsRecorder()
        self.served_by: dict[int, int] = {}
        self._has_servers = has_servers
        self._wait = wait
        self._waiting: list[Wakeup] = []  # of the user's threads
        self._loop = EventLoop(self.fail, lambda: self._core.decide())  # noqa: PLW0108 - made below
        self.versions = SentVersions(
            self._acknowledged_by,
            holder=lambda worker_id: self.served_by.get(worker_id, worker_id),
            is_coming=lambda w: sender.is_coming(self.served_by.get(w, w)),
        )
        self._core = PoolCore(
            plan,
            staleness,
            self.versions,
            transport,
            failure_sink=failure_sink,
            stats_recorder=self._stats_recorder,
            post=self._loop.post,
            clock=clock_ns,
            wake_user=self._wake_user,
        )
        self._lock = self._loop.lock
        self._failure: BaseException | None = None
        sender.on_acknowledged = self._acknowledged
        sender.on_left_out = self._left_out
        sender.on_pushed = self._stats_recorder.pushed

    # What is known.

    @property
    def worker_ids(self) -> tuple[int, ...]:
        """The workers' ids in order, with those that are being replaced."""
        with self._loop.reading():
            return tuple(w for w in self._core.slots.worker_ids if not is_server(w))

    @property
    def present(self) -> tuple[int, ...]:
        """The ids, in order, of the workers that collect and are there now."""
        with self._loop.reading():
            return tuple(sorted(slot.worker_id for slot in self._core.slots if slot.may_be_asked))

    def await_evaluators(self, worker_ids: Sequence[int] | None, timeout_s: float) -> Sequence[int]:
        """The workers that evaluate, once none has the run's first weights in place of newer ones.

        Args:
            worker_ids: these, whether they are there or not; None: those that are, at least one.
            timeout_s: to wait; empty if that was not long enough, or if none is on its way.

        Raises:
            DistCollectError: the run has ended.
        """
        ready: Sequence[int] = ()

        def are_ready() -> bool:
            nonlocal ready
            with self._loop.reading():
                slots, has_weights = self._core.slots, self._core.has_weights
                if worker_ids is None:
                    ready = [w for w in self.present if has_weights(w)]
                    return bool(ready or not slots.some_collect_or_will)
                is_ready = all(has_weights(w) or slots.get(w) is None for w in worker_ids)
                ready = worker_ids if is_ready else ()
                return is_ready

        self._await(are_ready, timeout_s)
        return ready

    def waiting_versions(self) -> list[int]:
        """The lowest version of each rollout that waits for delivery."""
        with self._loop.reading():
            return [request.version for request in self._core.requests.waiting()]

    @property
    def acknowledged(self) -> dict[int, int]:
        """worker_id to the newest version that it has."""
        return {worker_id: self._acknowledged_by(worker_id) for worker_id in self.worker_ids}

    def _acknowledged_by(self, worker_id: int) -> int:
        holder = self.served_by.get(worker_id, worker_id)
        # A server that has not been seen yet may get newer weights than it starts with.
        if is_server(holder) and self._core.slots.get(holder) is None:
            return -1
        return self._sender.acknowledged(holder)

    def holders(self, worker_ids: Iterable[int]) -> list[int]:
        """The slots that have the policies of these workers, as far as is known."""

        def has_own(worker_id: int) -> bool:
            is_reserved = is_server(worker_id) or worker_id in self._plan.reserved
            return is_reserved or not self._has_servers

        found = (self.served_by.get(w, w if has_own(w) else None) for w in worker_ids)
        return [*dict.fromkeys(holder for holder in found if holder is not None)]

    def _with_served(self, holder: int) -> list[int]:
        """Whose actions are chosen by the policy in a slot: the slot itself, or those it serves."""
        return [holder, *(w for w, server in self.served_by.items() if server == holder)]

    @property
    def stale_frames(self) -> dict[int, int]:
        """Frames that were given up or masked as too stale, by worker_id."""
        with self._loop.reading():
            return self._core.requests.stale_frames.copy()

    @property
    def ledger(self) -> LedgerReport:
        """Where all frames went."""
        with self._loop.reading():
            return self._core.requests.ledger.report()

    @property
    def paces(self) -> dict[int, WorkerThroughput]:
        """worker_id to how fast it is."""
        with self._loop.reading():
            return self._core.requests.paces

    @property
    def num_ready(self) -> dict[int, int]:
        """worker_id to how many of its rollouts wait for delivery; without those that have none."""
        with self._loop.reading():
            return self._core.requests.num_ready

    # Workers come and go: see :class:`~distcollect.roster.interfaces.MembershipObserver`.

    def join(self, worker_id: int, incarnation: int, peer: int, server: int | None = None) -> None:
        """A worker is there; it gets the newest weights that its slot is to have."""
        with self._lock:
            if self._core.closed:
                return
            newest, is_of_server = 0, is_server(worker_id)
            self._stats_recorder.joined(worker_id, incarnation, is_server=is_of_server)
            if server is None:
                newest = self._sender.welcome(worker_id, peer)
            else:
                self.served_by[worker_id] = server
            self._loop.post(self._core.worker_joined, worker_id, incarnation, peer, newest)
            self._refresh_served(worker_id)
        if not newest:  # else it is told when the worker has that version
            self.on_weights(worker_id, 0)

    def leave(self, worker_id: int, incarnation: int) -> None:
        """A worker is to leave: nothing more is requested from it."""
        self._loop.post(self._core.worker_leaving, worker_id, incarnation)

    def lose(self, worker_id: int, incarnation: int, *, replaced: bool) -> None:
        """A worker is gone; what was requested from it is requested from others."""
        with self._lock:
            if self._core.closed:
                return
            lost = partial(self._core.worker_lost, replaced=replaced)
            self._loop.post(lost, worker_id, incarnation)
        if worker_id not in self.served_by:
            self._sender.forget(worker_id, replaced=replaced)
            self._refresh_served(worker_id)

    def _refresh_served(self, holder: int) -> None:
        """What is known of the weights in a slot has changed: look at those that it serves."""
        for each in self._with_served(holder):
            self._loop.post(self._core.acknowledged, each)

    def account(self, worker_id: int, incarnation: int, cause: str, stepped: int | None) -> None:
        """Settle the frames of a process that is gone."""
        if not is_server(worker_id):  # a server steps none
            self._loop.post(self._core.requests.account, worker_id, incarnation, cause, stepped)

    def fail(self, error: BaseException) -> None:
        """The run can't go on: the user's thread raises ``error``. The first error counts."""
        with self._lock:
            if self._failure is None:
                self._failure = error
        self._wake_user()
        self._sender.expect_nobody()

    def _wake_user(self) -> None:
        for wakeup in list(self._waiting):
            wakeup.ring()

    def _await(self, is_done: Callable[[], bool], timeout_s: float) -> bool:
        """Wait on the user's thread until ``is_done()``; False if it is not in time.

        Raises:
            DistCollectError: the run has ended.
            KeyboardInterrupt, Interrupted: a signal came.
        """
        self._wait_until(lambda: is_done() or self._end() is not None, timeout_s)
        if is_done():
            return True
        self._check()
        return False

    def _wait_until(self, is_done: Callable[[], bool], timeout_s: float) -> None:
        if is_done():
            return
        wakeup = Wakeup()
        self._waiting.append(wakeup)
        try:
            self._wait(wakeup, is_done, timeout_s)
        finally:
            self._waiting.remove(wakeup)

    def _check(self) -> None:
        """Raise what ended the run, if anything did."""
        if (error := self._end()) is not None:
            raise error

    def _end(self) -> BaseException | None:
        """What ended the run, if anything did."""
        if self._core.closed:
            return CollectorStateError("the collector was shut down")
        if self._failure is None:
            return None
        # A copy: an error that was raised refers to the frames that it passed, and so to the
        # collector.
        error = copy.copy(self._failure)
        error.__cause__ = self._failure.__cause__
        return error

    # Batches.

    def get(self, timeout_s: float) -> list[RolloutRequest]:
        """Wait for the rollouts of the next batch, which come in the order of their workers' ids.

        In sync mode they are fresh, one of every worker. A worker collects once it has the newest
        weights that were sent to it. The share of one that is missing falls to the others. In async
        mode it is the next rollout of whichever worker; all go on collecting meanwhile.

        They are in the ledger once :meth:`delivered` or :meth:`given_up` is called with them.

        Args:
            timeout_s: seconds to wait.

        Raises:
            BatchTimeout: not all within ``timeout_s``; names the workers waited for.
            DistCollectError: the run can't go on.
        """
        requests = self._gather(Wanted.ALL if self._plan.sync else Wanted.NEXT, timeout_s)
        return sorted(requests, key=lambda request: origin(request.known_header))

    def hand_over(self, timeout_s: float, keep_s: float) -> RolloutRequest:
        """Return the next rollout of whichever worker, for another trainer; async mode only.

        Its worker keeps it for ``keep_s``. It counts as delivered once it was taken, else as lost:
        by "not_taken", "worker_lost" or "shut_down". If the only rollouts are some that were
        fetched for :meth:`get`, it is one of these, and delivered.

        Returns:
            The request. Its ``key`` opens the rollout on its worker; if it was fetched before, its
            ``tensors`` are here.

        Raises: as :meth:`get`.
        """
        [request] = self._gather(Wanted.REFERENCE, timeout_s, keep_s)
        if request.state is RolloutState.DELIVERED:
            self._loop.do(self._core.settle_delivered, [request], None)
        return request

    def _gather(
        self, wanted: Wanted, timeout_s: float, keep_s: float = 0.0
    ) -> Sequence[RolloutRequest]:
        def is_there() -> bool:
            return self._core.batch is not None

        signals.check()
        awaited = ""
        try:
            self._loop.do(self._want, wanted, keep_s)
            rest_s = timeout_s
            if self._plan.deadline_s is not None and self._plan.deadline_s < timeout_s:
                rest_s -= self._plan.deadline_s
                if not self._await(is_there, self._plan.deadline_s):
                    # Then the workers deliver what they have.
                    self._loop.do(self._core.end_early)
            if not self._await(is_there, rest_s):
                awaited = self._awaited()  # now: next, the workers may be told to end
        except BaseException:
            unwanted = self._loop.do(self._core.take_batch) or ()
            self._loop.do(self._core.settle_delivered, unwanted, "given_up")
            raise
        requests = self._loop.do(self._core.take_batch)  # it may have come just now
        if requests is None:
            raise BatchTimeout(
                f"no batch within {timeout_s:g} s; waited for {awaited}. "
                "Faults(batch_timeout_s=...) gives them longer"
            )
        self._stats_recorder.switch_to("assemble")
        return requests

    def _want(self, wanted: Wanted, keep_s: float) -> None:
        self._check()
        if wanted is not Wanted.REFERENCE:
            self._stats_recorder.batch_requested(self._core.requests.num_waiting)
        self._core.batch_wanted(wanted, keep_s)

    def _awaited(self) -> str:
        """Say which workers the user waits for, and where the first of them are, if they answer."""
        with self._loop.reading():
            awaited, late = self._core.awaited
        answers = {w: self.call(w, WorkerService.place) for w in late[:_NUM_PLACES]}
        silent = missing(answers, _PLACES_S)
        told = {w: a.result() for w, a in answers.items() if w not in silent and not a.exception()}
        return awaited + "".join(f"; worker {w} is in {place}" for w, place in told.items())

    def delivered(self, batch: Sequence[RolloutRequest], frames: Sequence[VersionFrames]) -> None:
        """The user has a batch, with these frames.

        Raises:
            CollectorStateError: its frames are lost, as the pool was closed meanwhile.
        """
        with self._lock:
            if self._core.closed:
                raise CollectorStateError("the collector was shut down")
            self._stats_recorder.delivered((f.worker_id, f.lag, f.num_frames) for f in frames)
            for each in frames:
                if each.is_masked:
                    self._core.requests.stale_frames[each.worker_id] += each.num_frames
            self._core.settle_delivered(batch, None)  # nothing follows from it

    def given_up(self, batch: Sequence[RolloutRequest], cause: str) -> None:
        """The user will not have a batch; its frames are lost by ``cause``."""
        self._loop.do(self._core.settle_delivered, batch, cause)

    # Weights.

    def push(
        self, flat: torch.Tensor, worker_ids: Sequence[int] | None = None, *, apart: bool = False
    ) -> PushHandle:
        """Publish a new version and send it.

        Args:
            flat: the snapshot, uint8; must not change any more.
            worker_ids: the workers to send it to; None: all.
            apart: no newer weights of other workers take its place.
        """

        def publish() -> PushHandle:
            self._check()
            selected = self.holders(self.worker_ids if worker_ids is None else worker_ids)
            self.version += 1
            published = [w for h in selected for w in self._with_served(h)]
            self._core.published(self.version, published)
            return self._sender.publish(flat, self.version, selected, apart=apart)

        # In the event loop, so that versions come to the sender in their order.
        return self._loop.do(publish)

    def _acknowledged(self, worker_id: int, version: int) -> None:
        with self._lock:
            if self._core.closed or self._failure is not None:
                return
            self._refresh_served(worker_id)
        self.on_weights(worker_id, version)

    def _left_out(self, worker_id: int, error: DistCollectError) -> None:
        with self._lock:
            if not self._core.closed:
                self._refresh_served(worker_id)  # nobody waits for its weights any more
        # In sync mode it must not go on with the weights that it has.
        if not (self._plan.sync or isinstance(error, WorkerLost)):
            return
        slot = self._core.slots.get(worker_id)
        if isinstance(error, WorkerError) and error.worker_id is None:
            self.fail(error)  # a replacement would fail in the same way
        elif slot is not None:
            self._failure_sink.report(worker_id, slot.incarnation, error)

    # Setup calls: the last call of each method also holds for workers that join later.

    def seed(
        self,
        seed: int,
        static_seed: bool = False,
        *,
        as_torchrl: bool = False,
        timeout_s: float,
    ) -> None:
        """Seed every worker; its next rollout starts with a reset.

        Env i of all gets the i-th seed drawn from ``seed``, or with ``static_seed`` all the same;
        ``as_torchrl``: the seeds that TorchRL's collectors draw.
        Rollouts from before are given up.

        Raises:
            DeadlineError: some took no seed in time; names them.
            WorkerError: one of them failed.
        """

        def seeds(slot: WorkerSlot) -> tuple[list[int], list[int]]:
            first = self._plan.first_env + slot.worker_id * self._plan.num_envs
            envs = range(first, first + self._plan.num_envs)
            incarnation = slot.incarnation
            return process_seeds(seed, envs, incarnation, static=static_seed, as_torchrl=as_torchrl)

        self._call_all(WorkerService.seed, lambda: seeds, timeout_s)

    def resume(
        self,
        version: int,
        first_traj_id: int,
        frames: int,
        timeout_s: float,
    ) -> None:
        """Go on where another run was.

        Args:
            version: its policy_version; the workers' weights are taken for that, or for the newest
                version that was published here, if it is higher.
            first_traj_id: all of its traj_ids are below; this run's start here.
            frames: that it delivered; they count as requested.
            timeout_s: for the workers to answer.

        Raises:
            DeadlineError: some did not in time; names them.
            WorkerError: one of them failed.
        """

        def renumber() -> SetupArguments:
            # The state's weights may have been published here. No number is used twice.
            newest = self.version = max(version, self.version)
            generation = self._sender.resume(newest)
            self._core.resumed(newest, frames)

            def request(slot: WorkerSlot) -> tuple[ResumeRequest]:
                version = newest
                if slot.worker_id not in self.served_by:  # else it has no weights
                    # One that waits for weights does not have that version yet.
                    version = min(newest, self._sender.acknowledged(slot.worker_id))
                return (ResumeRequest(version, first_traj_id, generation),)

            return request

        self._call_all(WorkerService.resume, renumber, timeout_s)

    def set_hooks(self, hooks: bytes, timeout_s: float) -> None:
        """Have every worker call these hooks from now on; rollouts from before are given up.

        Args:
            hooks: see :meth:`.WorkerService.set_hooks`.
            timeout_s: for the workers to answer.

        Raises:
            DeadlineError: some did not in time; names them.
            WorkerError: one of them could not unpickle the hooks.
        """
        self._call_all(WorkerService.set_hooks, lambda: lambda _: (hooks,), timeout_s)

    def _call_all(
        self,
        method: Callable[..., Any],
        prepare: Callable[[], SetupArguments],
        timeout_s: float,
    ) -> None:
        """Have all workers called, and wait for the answers of those that are there.

        If waiting ends by an exception, the workers are called nevertheless.
        """

        def begin() -> SetupCall:
            self._check()
            return self._core.setup_call_begun(method, prepare())

        call = self._loop.do(begin)
        if not self._await(lambda: not call.late, timeout_s):
            late = sorted(slot.worker_id for slot in list(call.late))
            raise DeadlineError(
                f"workers {late} did not take the call {method.__name__!r} within "
                f"{timeout_s:g} s: they finish the step, or evaluate(), that they are in first; "
                "Faults(batch_timeout_s=...) gives longer"
            )
        if call.errors:
            raise call.errors[0]

    def call(
        self,
        worker_id: int,
        method: Callable[Concatenate[Any, P], Any],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Future[Any]:
        """Call a method of a worker's service; fails with WorkerLost if it isn't there."""
        with self._lock:
            self._check()
            slot = self._core.slots.get(worker_id)
        if slot is not None:
            return self._core.call(slot, method, *args, **kwargs)
        answer: Future[Any] = Future()
        answer.set_exception(WorkerLost(f"worker {worker_id} is being replaced"))
        return answer

    def close(self) -> None:
        """Request nothing more; the user's threads that wait get an error."""
        if self._core.closed:
            return
        self._loop.do(self._core.closing)
        self._wait_until(lambda: not self._core.requests.among[RolloutState.KEPT], _TAKE_BACK_S)
        self._loop.do(self._core.close)
        self._sender.close()
