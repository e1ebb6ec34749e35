"""The trainer's side of all workers: what the user's thread asks of them, and who they are.

In sync mode a batch is asked for when the user asks for it: one rollout of every worker. In async
mode each worker always has a request open, so that it collects the next rollout while the last is
being fetched; rollouts are handed on first come, first served, unless staleness is bounded.

Workers come and go (:mod:`.workers` says who is there). What was asked of one that is gone is asked
of another.

It is made of parts, each of which knows only those below it::

    Pool            the user's thread, and those who look after workers
      Instructions    what all workers are to know before they collect again
      Giver           rollouts that other trainers take
      Gathering       asks workers for rollouts, and fetches them
      Waiting         the lock, and how the user's thread waits
        Requests        what was asked for, and what became of it
        Order           whom to ask, and what to hand on
        Seats           who is there

The last three are pure. There is one lock. It is taken where something comes in: by the methods of
:class:`Pool` and :meth:`.Instructions.give`, which it calls, and where a worker answers, in
:meth:`.Gathering.then`. All the rest is called with it held.
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
from distcollect.results import LedgerReport, Pace
from distcollect.rollout.header import Rollout
from distcollect.supervision.interfaces import Reports
from distcollect.telemetry.recorder import Book
from distcollect.trainer.fetcher import Gathering
from distcollect.trainer.handover import Giver
from distcollect.trainer.pool_wait import Waiting
from distcollect.trainer.request_policy import order_for
from distcollect.trainer.requests import Requests, origin
from distcollect.trainer.setup_calls import Instructions
from distcollect.trainer.staleness import SentVersions
from distcollect.trainer.worker_slots import Asked, BatchPlan, Seat, Seats
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
        reports: Reports,
        staleness: Staleness | None = None,
        book: Book | None = None,
    ) -> None:
        """Gather what ``plan`` says from whoever :meth:`join` names.

        Args:
            transport: reaches the workers.
            sender: for weights.
            plan: see there.
            reports: is told of workers that fail or have nothing more to give.
            staleness: which frames are too old, and what becomes of them.
            book: what to count in; None: where nobody looks.
        """
        self.version = 0
        self.on_weights: Callable[[int, int], None] = lambda *_: None
        self._transport = transport
        self._sender = sender
        self._plan = plan
        self._reports = reports
        self._book = book or Book()
        drops = staleness is not None and staleness.mode != "mask"
        max_lag = staleness.max_policy_lag if staleness is not None and drops else None
        self._sent = SentVersions()
        self._seats = Seats(plan.set_aside)
        self._order = order_for(plan, staleness, self._seats, self._sent, sender.acknowledged)
        self._requests = Requests(
            plan, self._seats, self._order, self._sent, max_lag=max_lag, drained=reports.drained
        )
        self._waiting = Waiting(
            self._seats, self._order, self._requests, self._book, sync=plan.sync
        )
        self._lock = self._waiting.lock
        self._gathering = Gathering(
            transport, plan, self._requests, self._waiting, reports=reports, book=self._book
        )
        self._giver = Giver(transport, self._requests, self._gathering, self._waiting)
        self._instructions = Instructions(
            transport, self._seats, self._requests, self._gathering, self._waiting
        )
        sender.on_acknowledged = self._acknowledged
        sender.on_left_out = self._left_out
        sender.on_pushed = self._book.pushed

    @property
    def worker_ids(self) -> tuple[int, ...]:
        """The workers' ids in order, with those that are being replaced."""
        with self._lock:
            return self._seats.worker_ids

    @property
    def present(self) -> tuple[int, ...]:
        """The ids, in order, of those who collect and are there now."""
        with self._lock:
            return tuple(sorted(seat.worker_id for seat in self._seats.staying()))

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
    def paces(self) -> dict[int, Pace]:
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

    # Who is there: see :class:`~distcollect.supervision.interfaces.Crew`.

    def join(self, worker_id: int, incarnation: int, peer: int) -> None:
        """A worker is there; it gets the newest weights that its slot is to have."""
        with self._lock:
            if self._waiting.closed:
                return
            seat = self._seats.take(worker_id, incarnation, peer)
            self._book.joined(worker_id, incarnation)
            self._requests.stale_frames.setdefault(worker_id, 0)
            version = self._sender.welcome(worker_id, peer)
            if version:
                self._sent.publish(version, [worker_id])
            self._instructions.give_newcomer(seat)
            self._gathering.ask()
            self._waiting.changed.notify_all()
        if not version:  # else it is told of when it has that
            self.on_weights(worker_id, 0)

    def leave(self, worker_id: int, incarnation: int) -> None:
        """A worker is to leave: it is asked for nothing more."""
        with self._lock:
            seat = self._seats.find(worker_id, incarnation)
            if seat is None:
                return
            seat.leaving = True
            self._gathering.fetch_ahead()
            self._requests.check_drained(seat)
            self._gathering.ask()

    def lose(self, worker_id: int, incarnation: int, *, replaced: bool) -> None:
        """A worker is gone; what was asked of it is asked of others."""
        with self._lock:
            if self._waiting.closed:
                return
            seat = self._seats.vacate(worker_id, incarnation, replaced=replaced)
            if seat is not None:
                self._requests.vacate(seat)
            # Also when it is only certain now that nobody comes: its share was kept for them.
            self._gathering.ask()
            self._waiting.changed.notify_all()
        self._sender.forget(worker_id, replaced=replaced)

    def account(self, worker_id: int, incarnation: int, cause: str, stepped: int | None) -> None:
        """Settle the frames of a process that is gone."""
        with self._lock:
            self._requests.account(worker_id, incarnation, cause, stepped)

    def fail(self, error: BaseException) -> None:
        """What the next wait, or the present one, raises. The first error counts."""
        with self._lock:
            self._waiting.fail(error)
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
            self._gathering.ask()
            try:
                limit_s = self._plan.deadline_s
                if limit_s is not None and limit_s < timeout_s:
                    begin = time.monotonic()
                    if not self._waiting.wait_for(self._all_are_here, limit_s):
                        self._gathering.preempt()
                    timeout_s -= time.monotonic() - begin
                self._waiting.wait(self._all_are_here, timeout_s)
            except BaseException:  # Ctrl-C as well
                # What comes of it later would be older than the next batch's question.
                self._requests.give_up_all()
                raise
            rollouts = self._requests.deliver_all()
        return sorted(rollouts, key=lambda rollout: origin(rollout.header))

    def _all_are_here(self) -> bool:
        self._gathering.give_up_stale()
        return len(self._requests.here) == self._plan.num_rollouts

    def gather_next(self, timeout_s: float) -> Rollout:
        """The next rollout of whichever worker; all go on collecting meanwhile.

        Raises: as :meth:`gather_all`.
        """
        with self._lock:
            self._begin()
            self._gathering.bring_here()
            try:
                self._gathering.ask()
                chosen = self._waiting.wait(self._next_here, timeout_s)
            finally:
                self._order.end()
            rollout = self._requests.deliver(chosen)
            self._order.delivered(chosen)
            self._gathering.fetch_ahead()
            self._gathering.ask()
        return rollout

    def _next_here(self) -> Asked | None:
        """What is to be handed on next, if it is here."""
        self._gathering.fetch_ahead()
        chosen = self._requests.to_hand_on()
        if chosen is None:
            return None
        self._gathering.fetch(chosen)
        return chosen if chosen.rollout is not None else None

    def hand_over(self, timeout_s: float, keep_s: float) -> tuple[Asked, str]:
        """The next rollout of whichever worker, for another trainer to take; async mode only.

        Its worker keeps it for ``keep_s``. It counts as delivered once it was taken, else as lost:
        by "not_taken", "worker_lost" or "shut_down". Where there are only rollouts that came here
        while the user still asked for such, it is one of these, and delivered.

        Returns:
            The rollout, and the key that opens it on its worker.

        Raises: as :meth:`gather_all`.
        """
        with self._lock:
            self._waiting.check()
            self._order.begin()
            self._gathering.leave_there()
            try:
                self._gathering.ask()
                asked, key = self._waiting.wait(self._giver.next(keep_s), timeout_s)
            finally:
                self._order.end()
            asked.referred = True
            self._order.delivered(asked)
            self._gathering.ask()
        return asked, key

    def _begin(self) -> None:
        self._waiting.check()
        self._book.found(len(self._requests.arrived))
        self._order.begin()

    # Weights.

    def push(self, flat: torch.Tensor, worker_ids: Sequence[int] | None = None) -> PushHandle:
        """Publish a new version and send it.

        Args:
            flat: the snapshot, uint8; must not change any more.
            worker_ids: to whom; None: to all.
        """
        with self._lock:
            self._waiting.check()
            selected = self.worker_ids if worker_ids is None else tuple(worker_ids)
            self.version += 1
            self._sent.publish(self.version, selected)
            self._order.published()
            # Under the lock, so that versions come to the sender in their order.
            return self._sender.publish(flat, self.version, selected)

    def _acknowledged(self, worker_id: int, version: int) -> None:
        with self._lock:
            if self._waiting.is_over:
                return
            self._gathering.ask()
            self._waiting.changed.notify_all()
        self.on_weights(worker_id, version)

    def _left_out(self, worker_id: int, error: DistCollectError) -> None:
        # In sync mode it must not go on with what it has.
        if not (self._plan.sync or isinstance(error, WorkerLost)):
            return
        seat = self._seats.get(worker_id)
        if isinstance(error, WorkerError) and error.worker_id is None:
            self.fail(error)  # nobody else would fare better
        elif seat is not None:
            self._reports.report(worker_id, seat.incarnation, error)

    # What all workers are told.

    def seed(self, seed: int, *, static_seed: bool, timeout_s: float) -> None:
        """Seed every worker; its next rollout starts with a reset.

        Env i of all gets the i-th seed drawn from ``seed``, or with ``static_seed`` all the same.
        Rollouts from before are given up.

        Raises:
            DeadlineError: some took no seed in time; names them.
            WorkerError: one of them failed.
        """

        def seeds(seat: Seat) -> tuple[list[int], list[int]]:
            first = self._plan.first_env + seat.worker_id * self._plan.num_envs
            envs = range(first, first + self._plan.num_envs)
            return process_seeds(seed, envs, seat.incarnation, static=static_seed)

        self._instructions.give("seed", seeds, timeout_s)

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
            self._order.frames_asked += frames
            self._sender.resume(version)
            self._sent.publish(version, self.worker_ids)
        self._instructions.give("resume", lambda _: (version, first_traj_id), timeout_s)

    def call(self, worker_id: int, method: str, *args: Any) -> Future[Any]:
        """Call a method of a worker's service; fails with WorkerLost if it isn't there."""
        with self._lock:
            self._waiting.check()
            seat = self._seats.get(worker_id)
            if seat is not None:
                return self._transport.call(seat.peer, method, *args)
        answer: Future[Any] = Future()
        answer.set_exception(WorkerLost(f"worker {worker_id} is being replaced"))
        return answer

    def close(self) -> None:
        """Ask for nothing more; who waits is woken with an error."""
        with self._lock:
            self._giver.take_back()
            self._waiting.close()
            self._requests.close()
        self._sender.close()
