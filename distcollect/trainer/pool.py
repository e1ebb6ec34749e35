"""The trainer's side of all workers: what the user's thread asks of them, and who they are.

In sync mode a batch is asked for when the user asks for it: one rollout of every worker. In async
mode each worker always has a request open, so that it collects the next rollout while the last is
being fetched; rollouts are handed on first come, first served, unless staleness is bounded.

Workers come and go (:mod:`.workers` says who is there). What was asked of one that is gone is asked
of another.

It is made of parts, each of which knows only those below it::

    Pool            the user's thread, and those who look after workers
      SetupCalls    what all workers are to know before they collect again
      HandoverSender           rollouts that other trainers take
      RolloutFetcher       asks workers for rollouts, and fetches them
      PoolWait         the lock, and how the user's thread waits
        Requests        what was asked for, and what became of it
        Scheduler           whom to ask, and what to hand on
        WorkerSlots           who is there

The last three are pure. There is one lock. It is taken where something comes in: by the methods of
:class:`Pool` and :meth:`.SetupCalls.give`, which it calls, and where a worker answers, in
:meth:`.RolloutFetcher.then`. All the rest is called with it held.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from distcollect.common.seeding import process_seeds
from distcollect.config import Staleness
from distcollect.errors import DistCollectError, WorkerError, WorkerLost
from distcollect.results import LedgerReport, WorkerThroughput
from distcollect.rollout.header import Rollout
from distcollect.supervision.interfaces import FailureSink
from distcollect.telemetry.recorder import StatsRecorder
from distcollect.trainer.fetcher import RolloutFetcher
from distcollect.trainer.handover import HandoverSender
from distcollect.trainer.pool_wait import PoolWait
from distcollect.trainer.requests import Requests, origin
from distcollect.trainer.scheduler import make_scheduler
from distcollect.trainer.setup_calls import SetupCalls
from distcollect.trainer.staleness import SentVersions
from distcollect.trainer.worker_slots import BatchPlan, RolloutRequest, WorkerSlot, WorkerSlots
from distcollect.transport.protocol import Transport
from distcollect.weights.push_handle import PushHandle
from distcollect.weights.sender import WeightSender


class Pool:
    """Gathers rollouts from workers, and orders weights before rollouts.

    Attributes:
        version: policy_version of the newest publication.
        on_weights: called with worker_id and version, when a worker is there and when it has
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
    ) -> None:
        """Gather what ``plan`` says from whoever :meth:`join` names.

        Args:
            transport: reaches the workers.
            sender: for weights.
            plan: see there.
            failure_sink: is told of workers that fail or have nothing more to give.
            staleness: which frames are too old, and what becomes of them.
            stats_recorder: what to count in; None: where nobody looks.
        """
        self.version = 0
        self.on_weights: Callable[[int, int], None] = lambda *_: None
        self._transport = transport
        self._sender = sender
        self._plan = plan
        self._failure_sink = failure_sink
        self._stats_recorder = stats_recorder or StatsRecorder()
        drops = staleness is not None and staleness.mode != "mask"
        max_lag = staleness.max_policy_lag if staleness is not None and drops else None
        self._sent = SentVersions()
        self._slots = WorkerSlots(plan.reserved)
        self._scheduler = make_scheduler(
            plan, staleness, self._slots, self._sent, sender.acknowledged
        )
        self._requests = Requests(
            plan,
            self._slots,
            self._scheduler,
            self._sent,
            max_lag=max_lag,
            drained=failure_sink.drained,
        )
        self._wait = PoolWait(
            self._slots, self._scheduler, self._requests, self._stats_recorder, sync=plan.sync
        )
        self._lock = self._wait.lock
        self._fetcher = RolloutFetcher(
            transport,
            plan,
            self._requests,
            self._wait,
            failure_sink=failure_sink,
            stats_recorder=self._stats_recorder,
        )
        self._giver = HandoverSender(transport, self._requests, self._fetcher, self._wait)
        self._setup_calls = SetupCalls(
            transport, self._slots, self._requests, self._fetcher, self._wait
        )
        sender.on_acknowledged = self._acknowledged
        sender.on_left_out = self._left_out
        sender.on_pushed = self._stats_recorder.pushed

    @property
    def worker_ids(self) -> tuple[int, ...]:
        """The workers' ids in order, with those that are being replaced."""
        with self._lock:
            return self._slots.worker_ids

    @property
    def present(self) -> tuple[int, ...]:
        """The ids, in order, of those who collect and are there now."""
        with self._lock:
            return tuple(sorted(slot.worker_id for slot in self._slots.staying()))

    @property
    def acknowledged(self) -> dict[int, int]:
        """worker_id to the newest version that it has."""
        return {worker_id: self._sender.acknowledged(worker_id) for worker_id in self.worker_ids}

    @property
    def stale_frames(self) -> dict[int, int]:
        """Frames that were given up as too stale, by worker_id; the caller may count more."""
        return self._requests.stale_frames

    @property
    def ledger(self) -> LedgerReport:
        """Where all frames went."""
        with self._lock:
            return self._requests.ledger

    @property
    def paces(self) -> dict[int, WorkerThroughput]:
        """worker_id to how fast it is."""
        with self._lock:
            return self._requests.paces

    @property
    def num_ready(self) -> dict[int, int]:
        """worker_id to how many of its rollouts lie ready, there or here; none if it has none."""
        with self._lock:
            return self._requests.num_ready

    def lag(self, worker_id: int, version: int) -> int:
        """How many versions newer than ``version`` were sent to a worker."""
        return self._sent.lag(worker_id, version)

    # Who is there: see :class:`~distcollect.supervision.interfaces.MembershipObserver`.

    def join(self, worker_id: int, incarnation: int, peer: int) -> None:
        """A worker is there; it gets the newest weights that its slot is to have."""
        with self._lock:
            if self._wait.closed:
                return
            slot = self._slots.take(worker_id, incarnation, peer)
            self._stats_recorder.joined(worker_id, incarnation)
            self._requests.stale_frames.setdefault(worker_id, 0)
            version = self._sender.welcome(worker_id, peer)
            if version:
                self._sent.publish(version, [worker_id])
            self._setup_calls.give_newcomer(slot)
            self._fetcher.ask()
            self._wait.changed.notify_all()
        if not version:  # else it is told of when it has that
            self.on_weights(worker_id, 0)

    def leave(self, worker_id: int, incarnation: int) -> None:
        """A worker is to leave: it is asked for nothing more."""
        with self._lock:
            slot = self._slots.find(worker_id, incarnation)
            if slot is None:
                return
            slot.leaving = True
            self._fetcher.fetch_ahead()
            self._requests.check_drained(slot)
            self._fetcher.ask()

    def lose(self, worker_id: int, incarnation: int, *, replaced: bool) -> None:
        """A worker is gone; what was asked of it is asked of others."""
        with self._lock:
            if self._wait.closed:
                return
            slot = self._slots.vacate(worker_id, incarnation, replaced=replaced)
            if slot is not None:
                self._requests.vacate(slot)
            # Also when it is only certain now that nobody comes: its share was kept for them.
            self._fetcher.ask()
            self._wait.changed.notify_all()
        self._sender.forget(worker_id, replaced=replaced)

    def account(self, worker_id: int, incarnation: int, cause: str, stepped: int | None) -> None:
        """Settle the frames of a process that is gone."""
        with self._lock:
            self._requests.account(worker_id, incarnation, cause, stepped)

    def fail(self, error: BaseException) -> None:
        """What the next wait, or the present one, raises. The first error counts."""
        with self._lock:
            self._wait.fail(error)
        self._sender.expect_nobody()

    # What the user's thread wants.

    def gather_all(self, timeout_s: float) -> list[Rollout]:
        """A batch of fresh rollouts, one of every worker, in the order of their ids.

        A worker collects once it has the newest weights that were sent to it. The share of one that
        is missing falls to the others.

        Raises:
            BatchTimeout: not all within ``timeout_s``; names the workers waited for.
            DistCollectError: the run can't go on.
        """
        with self._lock:
            self._begin()
            self._fetcher.ask()
            try:
                limit_s = self._plan.deadline_s
                if limit_s is not None and limit_s < timeout_s:
                    begin = time.monotonic()
                    if not self._wait.wait_for(self._all_are_here, limit_s):
                        self._fetcher.preempt()
                    timeout_s -= time.monotonic() - begin
                self._wait.wait(self._all_are_here, timeout_s)
            except BaseException:  # Ctrl-C as well
                # What comes of it later would be older than the next batch's question.
                self._requests.give_up_all()
                raise
            rollouts = self._requests.deliver_all()
        return sorted(rollouts, key=lambda rollout: origin(rollout.header))

    def _all_are_here(self) -> bool:
        self._fetcher.give_up_stale()
        return len(self._requests.here) == self._plan.num_rollouts

    def gather_next(self, timeout_s: float) -> Rollout:
        """The next rollout of whichever worker; all go on collecting meanwhile.

        Raises: as :meth:`gather_all`.
        """
        with self._lock:
            self._begin()
            self._fetcher.bring_here()
            try:
                self._fetcher.ask()
                chosen = self._wait.wait(self._next_here, timeout_s)
            finally:
                self._scheduler.end()
            rollout = self._requests.deliver(chosen)
            self._scheduler.delivered(chosen)
            self._fetcher.fetch_ahead()
            self._fetcher.ask()
        return rollout

    def _next_here(self) -> RolloutRequest | None:
        """What is to be handed on next, if it is here."""
        self._fetcher.fetch_ahead()
        chosen = self._requests.next_delivery()
        if chosen is None:
            return None
        self._fetcher.fetch(chosen)
        return chosen if chosen.rollout is not None else None

    def hand_over(self, timeout_s: float, keep_s: float) -> tuple[RolloutRequest, str]:
        """The next rollout of whichever worker, for another trainer to take; async mode only.

        Its worker keeps it for ``keep_s``. It counts as delivered once it was taken, else as lost:
        by "not_taken", "worker_lost" or "shut_down". Where there are only rollouts that came here
        while the user still asked for such, it is one of these, and delivered.

        Returns:
            The rollout, and the key that opens it on its worker.

        Raises: as :meth:`gather_all`.
        """
        with self._lock:
            self._wait.check()
            self._scheduler.begin()
            self._fetcher.leave_there()
            try:
                self._fetcher.ask()
                request, key = self._wait.wait(self._giver.next(keep_s), timeout_s)
            finally:
                self._scheduler.end()
            request.referred = True
            self._scheduler.delivered(request)
            self._fetcher.ask()
        return request, key

    def _begin(self) -> None:
        self._wait.check()
        self._stats_recorder.batch_requested(len(self._requests.arrived))
        self._scheduler.begin()

    # Weights.

    def push(self, flat: torch.Tensor, worker_ids: Sequence[int] | None = None) -> PushHandle:
        """Publish a new version and send it.

        Args:
            flat: the snapshot, uint8; must not change any more.
            worker_ids: to whom; None: to all.
        """
        with self._lock:
            self._wait.check()
            selected = self.worker_ids if worker_ids is None else tuple(worker_ids)
            self.version += 1
            self._sent.publish(self.version, selected)
            self._scheduler.published()
            # Under the lock, so that versions come to the sender in their order.
            return self._sender.publish(flat, self.version, selected)

    def _acknowledged(self, worker_id: int, version: int) -> None:
        with self._lock:
            if self._wait.is_over:
                return
            self._fetcher.ask()
            self._wait.changed.notify_all()
        self.on_weights(worker_id, version)

    def _left_out(self, worker_id: int, error: DistCollectError) -> None:
        # In sync mode it must not go on with what it has.
        if not (self._plan.sync or isinstance(error, WorkerLost)):
            return
        slot = self._slots.get(worker_id)
        if isinstance(error, WorkerError) and error.worker_id is None:
            self.fail(error)  # nobody else would fare better
        elif slot is not None:
            self._failure_sink.report(worker_id, slot.incarnation, error)

    # What all workers are told.

    def seed(self, seed: int, *, static_seed: bool, timeout_s: float) -> None:
        """Seed every worker; its next rollout starts with a reset.

        Env i of all gets the i-th seed drawn from ``seed``, or with ``static_seed`` all the same.
        Rollouts from before are given up.

        Raises:
            DeadlineError: some took no seed in time; names them.
            WorkerError: one of them failed.
        """

        def seeds(slot: WorkerSlot) -> tuple[list[int], list[int]]:
            first = self._plan.first_env + slot.worker_id * self._plan.num_envs
            envs = range(first, first + self._plan.num_envs)
            return process_seeds(seed, envs, slot.incarnation, static=static_seed)

        self._setup_calls.give("seed", seeds, timeout_s)

    def resume(self, version: int, first_traj_id: int, frames: int, timeout_s: float) -> None:
        """Go on where another run was.

        Args:
            version: its policy_version; the workers' weights are taken for that.
            first_traj_id: all of its traj_ids are below; so are none of this one's then.
            frames: that it delivered; they count as asked for.
            timeout_s: for the workers to take note.

        Raises:
            DeadlineError: some did not in time; names them.
            WorkerError: one of them failed.
        """
        with self._lock:
            self.version = version
            self._scheduler.frames_asked += frames
            self._sender.resume(version)
            self._sent.publish(version, self.worker_ids)
        self._setup_calls.give("resume", lambda _: (version, first_traj_id), timeout_s)

    def call(self, worker_id: int, method: str, *args: Any) -> Future[Any]:
        """Call a method of a worker's service; fails with WorkerLost if it isn't there."""
        with self._lock:
            self._wait.check()
            slot = self._slots.get(worker_id)
            if slot is not None:
                return self._transport.call(slot.peer, method, *args)
        answer: Future[Any] = Future()
        answer.set_exception(WorkerLost(f"worker {worker_id} is being replaced"))
        return answer

    def close(self) -> None:
        """Ask for nothing more; who waits is woken with an error."""
        with self._lock:
            self._giver.take_back()
            self._wait.close()
            self._requests.close()
        self._sender.close()
