"""The trainer's side of all workers: asks for rollouts, gathers them, pushes weights.

In sync mode a batch is asked for when the user asks for it: one rollout of every worker. In async
mode each worker always has a request open, so that it collects the next rollout while the last is
being fetched; rollouts are handed on first come, first served, unless staleness is bounded.

Workers come and go (:mod:`.workers` says who is there). What was asked of one that is gone is asked
of another.
"""

from __future__ import annotations

import copy
import logging
import math
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import torch

from .book import Activity, Book
from .config import Staleness
from .crew import Reports
from .errors import (
    BatchTimeout,
    CollectorStateError,
    DeadlineError,
    DistCollectError,
    WorkerError,
    WorkerLost,
)
from .handle import PushHandle
from .ledger import Ledger, LedgerReport
from .meter import clock_ns
from .notice import heed
from .rollout import Rollout, Tensors
from .schedule import Pacer, SentVersions, Ticket
from .seats import Asked, BatchPlan, Pace, Seat
from .seeds import Stream, env_seed, policy_seed
from .threads import LOOK_UP_S, missing
from .transport import CollectRequest, Offer, Transport
from .weights import WeightSender

log = logging.getLogger(__name__)

T = TypeVar("T")

# Rollouts that lie fetched, or are being fetched, before the user asks: one is on its way while
# the user works on another. More would only make them older.
_PREFETCH = 2
# At the end, for workers to say which of the rollouts that they keep were taken after all.
_TAKE_BACK_S = 2.0


class Pool:
    """Gathers rollouts from workers, and orders weights before rollouts.

    Attributes:
        version: policy_version of the newest publication.
        on_weights: called with worker_id and version, when a worker is there and when it has
            acknowledged new weights; without the pool's lock.
        stale_frames: frames that were given up as too stale, by worker_id.
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
        self.stale_frames: dict[int, int] = {}
        self.on_weights: Callable[[int, int], None] = lambda *_: None
        self._transport = transport
        self._sender = sender
        self._plan = plan
        self._reports = reports
        self._book = book or Book()
        self._seats: dict[int, Seat] = {}
        self._coming: set[int] = set()  # slots whose worker is being replaced
        self._ledger = Ledger()
        self._paces: dict[int, Pace] = {}
        self._unaccounted: dict[tuple[int, int], int] = {}  # frames asked of a process that is gone
        self._sent = SentVersions()
        self._max_lag: int | None = None  # of what is handed on
        self._pacer: Pacer | None = None
        if staleness is not None and staleness.mode != "mask":
            self._max_lag = staleness.max_policy_lag
            if staleness.mode == "pace" and not plan.sync:
                self._pacer = Pacer(staleness.max_policy_lag, self._sent)
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._arrived: list[Asked] = []  # those that lie ready, there or here, in that order
        # Nothing before the user asks: it may be for a rollout to hand over.
        self._max_fetched = plan.num_rollouts if plan.sync else 0
        self._hands_over = False  # that is what the user last asked for
        self._handed_over: dict[Asked, str] = {}  # those that may still be taken, and their keys
        self._untaken = "not_taken"  # the cause for one that nobody took
        self._frames_asked = 0
        self._requests = 0
        self._epoch = 0  # how often all that was asked for was given up
        self._batch = 0
        self._preempted_batch = -1
        self._wanted = 0  # in sync mode: rollouts of this batch that nobody was asked for
        self._told: dict[str, Callable[[Seat], Future[None]]] = {}
        self._telling = False
        self._awaiting = False  # somebody wants the next batch
        self._failed: BaseException | None = None
        self._closed = False
        sender.on_acknowledged = self._acknowledged
        sender.on_left_out = self._left_out
        sender.on_pushed = self._book.pushed

    @property
    def worker_ids(self) -> tuple[int, ...]:
        """The workers' ids in order, with those that are being replaced."""
        with self._lock:
            return tuple(sorted(self._seats.keys() | self._coming))

    @property
    def present(self) -> tuple[int, ...]:
        """The ids, in order, of those who collect and are there now."""
        with self._lock:
            return tuple(sorted(seat.worker_id for seat in self._staying()))

    @property
    def acknowledged(self) -> dict[int, int]:
        """worker_id to the newest version that it has."""
        return {worker_id: self._sender.acknowledged(worker_id) for worker_id in self.worker_ids}

    @property
    def ledger(self) -> LedgerReport:
        """Where all frames went."""
        with self._lock:
            return self._ledger.report()

    @property
    def paces(self) -> dict[int, Pace]:
        """worker_id to how fast it is."""
        with self._lock:
            return dict(sorted(self._paces.items()))

    @property
    def num_ready(self) -> dict[int, int]:
        """worker_id to how many of its rollouts lie ready, there or here; none if it has none."""
        with self._lock:
            return dict(Counter(asked.ticket.worker_id for asked in self._arrived))

    def lag(self, worker_id: int, version: int) -> int:
        """How many versions newer than ``version`` were sent to a worker."""
        return self._sent.lag(worker_id, version)

    # Who is there: see :class:`~distcollect.crew.Crew`.

    def join(self, worker_id: int, incarnation: int, peer: int) -> None:
        """A worker is there; it gets the newest weights that its slot is to have."""
        with self._lock:
            if self._closed:
                return
            turn = min((other.turn for other in self._collecting()), default=0)
            seat = self._seats[worker_id] = Seat(worker_id, incarnation, peer, turn=turn)
            self._coming.discard(worker_id)
            self._book.joined(worker_id, incarnation)
            self.stale_frames.setdefault(worker_id, 0)
            version = self._sender.welcome(worker_id, peer)
            if version:
                self._sent.publish(version, [worker_id])
            for tell in self._told.values():
                seat.untold += 1
                self._then(seat, tell(seat), lambda _: self._has_told(seat))
            self._ask()
            self._changed.notify_all()
        if not version:  # else it is told of when it has that
            self.on_weights(worker_id, 0)

    def _has_told(self, seat: Seat) -> None:
        seat.untold -= 1

    def leave(self, worker_id: int, incarnation: int) -> None:
        """A worker is to leave: it is asked for nothing more."""
        with self._lock:
            seat = self._seats.get(worker_id)
            if seat is None or seat.incarnation != incarnation:
                return
            seat.leaving = True
            self._fetch_offers()
            self._check_drained(seat)
            self._ask()

    def lose(self, worker_id: int, incarnation: int, *, replaced: bool) -> None:
        """A worker is gone; what was asked of it is asked of others."""
        with self._lock:
            if self._closed:
                return
            if replaced:
                self._coming.add(worker_id)
            else:
                self._coming.discard(worker_id)
            seat = self._seats.get(worker_id)
            present = seat is not None and seat.incarnation == incarnation
            if seat is not None and present:
                del self._seats[worker_id]
                self._vacate(seat)
            # Also when it is only certain now that nobody comes: its share was kept for them.
            self._ask()
            self._changed.notify_all()
        self._sender.forget(worker_id, replaced=replaced)

    def _vacate(self, seat: Seat) -> None:
        seat.gone = True
        self._note_unknown(seat)
        for asked in [asked for asked in seat.open if not asked.fetching]:
            if asked in self._arrived:
                self._arrived.remove(asked)
            self._give_up(asked, "worker_lost")

    def _note_unknown(self, seat: Seat) -> None:
        unknown = sum(asked.offer is None for asked in seat.open)
        self._unaccounted[seat.worker_id, seat.incarnation] = unknown * self._plan.rollout_frames

    def account(self, worker_id: int, incarnation: int, cause: str, stepped: int | None) -> None:
        """Settle the frames of a process that is gone."""
        with self._lock:
            at_most = self._unaccounted.pop((worker_id, incarnation), 0)
            self._ledger.end(worker_id, incarnation, cause, stepped=stepped, at_most=at_most)

    def fail(self, error: BaseException) -> None:
        """What the next wait, or the present one, raises. The first error counts."""
        with self._lock:
            if self._failed is None:
                self._failed = error
            self._changed.notify_all()
        self._sender.expect_nobody()

    def gather_all(self, timeout_s: float) -> list[Rollout]:
        """A batch of fresh rollouts, one of every worker, in the order of their ids.

        A worker collects once it has the newest weights that were sent to it. The share of one that
        is missing falls to the others.

        Raises:
            BatchTimeout: not all within ``timeout_s``; names the workers waited for.
            DistCollectError: the run can't go on.
        """
        with self._lock:
            self._check()
            self._batch += 1
            self._book.found(len(self._arrived))
            self._wanted = self._plan.num_rollouts
            self._ask()
            try:
                limit_s = self._plan.deadline_s
                if limit_s is not None and limit_s < timeout_s:
                    begin = time.monotonic()
                    if not self._wait_for(self._all_are_here, limit_s):
                        self._preempt()
                    timeout_s -= time.monotonic() - begin
                self._wait(self._all_are_here, timeout_s)
            except BaseException:  # Ctrl-C as well
                # What comes of it later would be older than the next batch's question.
                self._give_up_all()
                raise
            rollouts = self._here()
            for rollout in rollouts:
                self._deliver(rollout)
            self._arrived.clear()
        return sorted(rollouts, key=_origin)

    def gather_next(self, timeout_s: float) -> Rollout:
        """The next rollout of whichever worker; all go on collecting meanwhile.

        Raises: as :meth:`gather_all`.
        """
        with self._lock:
            self._check()
            self._book.found(len(self._arrived))
            if self._pacer is not None:
                self._pacer.awaited()
            self._max_fetched, self._hands_over = _PREFETCH, False
            self._awaiting = True
            try:
                self._ask()
                chosen = self._wait(self._choose, timeout_s)
            finally:
                self._awaiting = False
            assert chosen.rollout is not None
            chosen.seat.turn += 1
            self._arrived.remove(chosen)
            self._deliver(chosen.rollout)
            if self._pacer is not None:
                self._pacer.delivered(chosen.ticket)
            self._fetch_offers()
            self._ask()
        return chosen.rollout

    def hand_over(self, timeout_s: float, keep_s: float) -> tuple[Asked, str]:
        """The next rollout of whichever worker, for another trainer to take; async mode only.

        Its worker keeps it for ``keep_s``. It counts as delivered once it was taken, else as lost:
        by "not_taken", "worker_lost" or "shut_down". Where there are only rollouts that came here
        while the user still asked for such, it is one of these, and delivered.

        Returns:
            The rollout, and the key that opens it on its worker.

        Raises: as :meth:`gather_all`.
        """
        handed: tuple[Asked, str] | None = None

        def ready() -> tuple[Asked, str] | None:
            nonlocal handed
            if handed is None or handed[0].failed:
                handed = self._hand_over(keep_s)
            if handed is None:
                return None
            asked, _ = handed
            return handed if asked.kept or asked.rollout is not None else None

        with self._lock:
            self._check()
            if self._pacer is not None:
                self._pacer.awaited()
            self._max_fetched, self._hands_over = 0, True
            self._ask()
            asked, key = self._wait(ready, timeout_s)
            asked.referred = True
            if self._pacer is not None:
                self._pacer.delivered(asked.ticket)
            self._ask()
        return asked, key

    def _hand_over(self, keep_s: float) -> tuple[Asked, str] | None:
        """Have a worker keep what lies there, if anything does; with its key."""
        self._give_up_stale()
        able = [asked for asked in self._arrived if asked.lies_there]
        if not able and not any(seat.collecting for seat in self._collecting()):
            able = [asked for asked in self._arrived if asked.rollout is not None]
        if not able:
            return None
        asked = able[0]
        if self._pacer is not None:
            asked = max(able, key=lambda a: self.lag(a.ticket.worker_id, a.ticket.version))
        self._arrived.remove(asked)
        key = secrets.token_hex(8)
        if asked.rollout is not None:
            self._deliver(asked.rollout)
        else:
            self._keep(asked, key, keep_s)
        return asked, key

    def _keep(self, asked: Asked, key: str, keep_s: float) -> None:
        """Have its worker keep a rollout, and account for it."""
        seat, offer = asked.seat, asked.offer
        assert offer is not None
        self._handed_over[asked] = key
        asked.fetching = True
        offer.decline()

        def settle(cause: str | None) -> None:
            asked.fetching, asked.failed = False, not asked.referred
            self._handed_over.pop(asked, None)
            if cause != "worker_lost":  # else its memory is of no use any more
                seat.unsettled.discard(asked.number)
            seat.open.discard(asked)
            origin = seat.worker_id, seat.incarnation, offer.header.sequence
            if cause is None:
                self._ledger.deliver(*origin)
            else:
                self._ledger.lose(*origin, cause)
            if not asked.referred:
                self._frames_asked -= self._plan.rollout_frames
                if self._pacer is not None:
                    self._pacer.given_up(asked.ticket)
            self._check_drained(seat)

        def over(taken: bool) -> None:
            settle(None if taken else self._untaken)

        def kept(_: None) -> None:
            asked.kept = True
            self._then(seat, ask(seat.peer, "handed_over", key), over, lost)

        lost = partial(settle, "worker_lost")
        ask = self._transport.call
        self._then(seat, ask(seat.peer, "hand_over", asked.number, key, keep_s), kept, lost)

    def _deliver(self, rollout: Rollout) -> None:
        self._ledger.deliver(*_origin(rollout))

    def _all_are_here(self) -> bool:
        self._give_up_stale()
        return len(self._here()) == self._plan.num_rollouts

    def _here(self) -> list[Rollout]:
        return [asked.rollout for asked in self._arrived if asked.rollout is not None]

    def _choose(self) -> Asked | None:
        """What is to be handed on next, if it is here."""
        self._fetch_offers()
        if self._plan.in_turn:
            return self._due()
        if self._pacer is None:
            return self._first_here()
        ticket = self._pacer.choose([asked.ticket for asked in self._arrived])
        if ticket is None:
            return None
        chosen = next(asked for asked in self._arrived if asked.ticket is ticket)
        self._fetch(chosen)
        return chosen if chosen.rollout is not None else None

    def _due(self) -> Asked | None:
        """The rollout of the worker whose turn it is, once all others that can be are at work."""
        if any(self._is_idle(s) and not self._is_up_to_date(s.worker_id) for s in self._staying()):
            return None
        due = min(self._collecting(), key=_turn, default=None)
        chosen = next((asked for asked in self._arrived if asked.seat is due), None)
        if chosen is None:
            return None
        self._fetch(chosen)
        return chosen if chosen.rollout is not None else None

    def _first_here(self) -> Asked | None:
        """What came here first, but none of a worker's rollouts before an older one of it."""
        passed_over: set[Seat] = set()
        for asked in self._arrived:
            if asked.rollout is not None and asked.seat not in passed_over:
                return asked
            passed_over.add(asked.seat)
        return None

    def seed(self, seed: int, *, static_seed: bool, timeout_s: float) -> None:
        """Seed every worker; its next rollout starts with a reset.

        Env i of all gets the i-th seed drawn from ``seed``, or with ``static_seed`` all the same.
        Rollouts from before are given up.

        Raises:
            DeadlineError: some took no seed in time; names them.
            WorkerError: one of them failed.
        """
        self._tell_all("seed", partial(self._seed, seed=seed, static_seed=static_seed), timeout_s)

    def _seed(self, seat: Seat, *, seed: int, static_seed: bool) -> Future[None]:
        num_envs = self._plan.num_envs
        first = self._plan.first_env + seat.worker_id * num_envs
        # A process that takes another's place would repeat what that one did.
        stream = Stream.REPLACED + 2 * seat.incarnation if seat.incarnation else 0
        rows = range(first, first + num_envs)
        env_seeds = [env_seed(seed, 0 if static_seed else row, stream=stream) for row in rows]
        policy_seeds = [policy_seed(seed, row, stream=stream + 1) for row in rows]
        return self._transport.call(seat.peer, "seed", env_seeds, policy_seeds)

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
            self._frames_asked += frames
            self._sender.resume(version)
            self._sent.publish(version, self.worker_ids)
        tell = partial(self._resume, version=version, first_traj_id=first_traj_id)
        self._tell_all("resume", tell, timeout_s)

    def _resume(self, seat: Seat, *, version: int, first_traj_id: int) -> Future[None]:
        return self._transport.call(seat.peer, "resume", version, first_traj_id)

    def call(self, worker_id: int, method: str, *args: Any) -> Future[Any]:
        """Call a method of a worker's service; fails with WorkerLost if it isn't there."""
        with self._lock:
            self._check()
            seat = self._seats.get(worker_id)
            if seat is not None:
                return self._transport.call(seat.peer, method, *args)
        answer: Future[Any] = Future()
        answer.set_exception(WorkerLost(f"worker {worker_id} is being replaced"))
        return answer

    def _tell_all(self, what: str, tell: Callable[[Seat], Future[None]], timeout_s: float) -> None:
        """Have all workers, and those yet to come, know something before they collect again."""
        with self._lock:
            self._check()
            self._telling = True
            self._told[what] = tell
            self._give_up_all()
            answers = {worker_id: tell(seat) for worker_id, seat in self._seats.items()}
        try:
            if late := missing(answers, timeout_s):
                raise DeadlineError(
                    f"workers {late} did not take the call {what!r} within {timeout_s:g} s: they "
                    "finish the step that they are in first; Faults(batch_timeout_s=...) gives "
                    "longer"
                )
            for answer in answers.values():
                error = answer.exception()
                if error is not None and not isinstance(error, WorkerLost):
                    raise error
        finally:
            # Calls may overtake each other on their way, so only now may more be asked for.
            self._telling = False

    def _give_up_all(self) -> None:
        """Take no rollout that was asked for until now."""
        self._epoch += 1
        self._wanted = 0
        for asked in list(self._arrived):
            self._arrived.remove(asked)
            # One that is being fetched is settled when it arrives.
            if not asked.fetching:
                self._give_up(asked, "given_up")

    def _give_up(self, asked: Asked, cause: str) -> None:
        """Settle a rollout that is not handed on."""
        seat = asked.seat
        seat.unsettled.discard(asked.number)
        seat.open.discard(asked)
        if asked.offer is not None:
            header = asked.offer.header
            self._ledger.lose(header.worker_id, header.incarnation, header.sequence, cause)
            if asked.rollout is None:
                asked.offer.decline()
        self._frames_asked -= self._plan.rollout_frames
        if self._pacer is not None:
            self._pacer.given_up(asked.ticket)
        if self._plan.sync and asked.epoch == self._epoch:
            self._wanted += 1
        self._check_drained(seat)

    def _check_drained(self, seat: Seat) -> None:
        owes = seat.collecting or seat.unsettled
        if seat.leaving and not (seat.gone or seat.drained or owes):
            seat.drained = True
            self._reports.drained(seat.worker_id, seat.incarnation)

    def _give_up_stale(self) -> None:
        if self._max_lag is None:
            return
        stale = [
            asked
            for asked in self._arrived
            if not asked.fetching
            and self.lag(asked.ticket.worker_id, asked.ticket.version) > self._max_lag
        ]
        self._arrived = [asked for asked in self._arrived if asked not in stale]
        for asked in stale:
            assert asked.offer is not None
            self.stale_frames[asked.ticket.worker_id] += asked.offer.header.num_frames
            self._give_up(asked, "stale")
        if stale:
            self._ask()

    def push(self, flat: torch.Tensor, worker_ids: Sequence[int] | None = None) -> PushHandle:
        """Publish a new version and send it.

        Args:
            flat: the snapshot, uint8; must not change any more.
            worker_ids: to whom; None: to all.
        """
        with self._lock:
            self._check()
            selected = self.worker_ids if worker_ids is None else tuple(worker_ids)
            self.version += 1
            self._sent.publish(self.version, selected)
            if self._pacer is not None:
                self._pacer.published()
            # Under the lock, so that versions come to the sender in their order.
            return self._sender.publish(flat, self.version, selected)

    def _acknowledged(self, worker_id: int, version: int) -> None:
        with self._lock:
            if self._closed or self._failed is not None:
                return
            self._ask()
            self._changed.notify_all()
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

    def close(self) -> None:
        """Ask for nothing more; who waits is woken with an error."""
        with self._lock:
            self._take_back()
            self._closed = True
            # Those that are on their way here as well, though nobody may want them any more.
            self._ledger.lose_waiting("shut_down")
            for seat in self._seats.values():
                self._note_unknown(seat)
            self._arrived.clear()
            self._changed.notify_all()
        self._sender.close()

    def _take_back(self) -> None:
        """Learn for certain which of the rollouts that may still be taken were."""
        self._untaken = "shut_down"
        for asked, key in list(self._handed_over.items()):
            self._transport.call(asked.seat.peer, "take_back", key)
        deadline = time.monotonic() + _TAKE_BACK_S
        while self._handed_over and (remaining := deadline - time.monotonic()) > 0:
            self._changed.wait(min(remaining, LOOK_UP_S))

    def _check(self) -> None:
        if self._closed:
            raise CollectorStateError("the collector was shut down")
        if self._failed is not None:
            # A copy: what was raised refers to those it passed, and so to the collector.
            raise copy.copy(self._failed) from self._failed.__cause__

    def _wait(self, ready: Callable[[], T | None], timeout_s: float) -> T:
        """Wait until ``ready`` gives something, and give it."""
        result = self._wait_for(ready, timeout_s)
        if not result:
            raise BatchTimeout(
                f"no batch within {timeout_s:g} s; waited for {self._awaited()}. "
                "Faults(batch_timeout_s=...) gives them longer"
            )
        return result

    def _wait_for(self, ready: Callable[[], T | None], timeout_s: float) -> T | None:
        deadline = time.monotonic() + timeout_s
        while not (result := ready()):
            heed()
            self._check()
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return None
            self._book.does(self._waits_for())
            self._changed.wait(min(remaining, LOOK_UP_S))
        self._book.does("assemble")
        return result

    def _waits_for(self) -> Activity:
        """What stands between the user's thread and its batch."""
        collecting = any(seat.collecting for seat in self._seats.values())
        # In async mode the first that arrives will do.
        if any(asked.fetching for asked in self._arrived) and not (self._plan.sync and collecting):
            return "transfer"
        seats = self._collecting()
        if collecting or not seats or all(self._is_up_to_date(seat.worker_id) for seat in seats):
            return "collect"
        return "weights"

    def _awaited(self) -> str:
        """Whom we wait for, in words."""
        seats = sorted(self._collecting(), key=lambda seat: seat.worker_id)
        late = [seat.worker_id for seat in seats if seat.unsettled]
        behind = [
            seat.worker_id
            for seat in seats
            if not seat.unsettled and not self._is_up_to_date(seat.worker_id)
        ]
        parts = []
        if late or not (behind or self._coming):
            parts.append(f"workers {late}")
        if behind and (self._plan.sync or not late):
            parts.append(f"workers {behind} to acknowledge the newest weights sent to them")
        if self._handed_over:
            parts.append(f"other trainers to take {len(self._handed_over)} rollout(s)")
        if self._coming:
            parts.append(f"workers {sorted(self._coming)} to be replaced")
        return " and for ".join(parts)

    def _is_up_to_date(self, worker_id: int) -> bool:
        return self._sender.acknowledged(worker_id) >= self._sent.newest(worker_id)

    def _ask(self) -> None:
        """Ask whoever can be asked for a rollout; called whenever that may have changed."""
        if self._telling or self._closed:
            return
        if self._plan.in_turn and not self._plan.sync:
            self._ask_in_turn()
            return
        # Who has waited longest comes first: a bound on staleness may not leave room for all.
        may = self._may_ask_for_batch if self._plan.sync else self._may_ask_ahead
        for seat in sorted(self._staying(), key=lambda seat: seat.last_asked):
            if may(seat):
                self._request(seat)

    def _ask_in_turn(self) -> None:
        # Not before the user wants a batch: until then more weights may be published.
        if not self._awaiting:
            return
        for seat in sorted(self._staying(), key=_turn):
            if self._is_idle(seat):
                if not self._is_up_to_date(seat.worker_id):
                    return  # or others would be asked before it, or not, as it happens
                self._request(seat)

    def _collecting(self) -> list[Seat]:
        set_aside = self._plan.set_aside
        return [seat for seat in self._seats.values() if seat.worker_id not in set_aside]

    def _may_ask_for_batch(self, seat: Seat) -> bool:
        if self._wanted <= 0 or seat.unsettled or not self._is_up_to_date(seat.worker_id):
            return False
        if seat.batch != self._batch:
            return True
        # A second share is one that nobody else is there for.
        others = sum(s.batch != self._batch and not s.leaving for s in self._collecting())
        coming = self._coming - self._plan.set_aside
        awaited = len(coming) if self._plan.waits_for_missing else 0
        return self._wanted > others + awaited

    def _is_idle(self, seat: Seat) -> bool:
        """Whether it has nothing to do, and nothing of it waits to be handed on."""
        return not seat.unsettled and not any(asked.seat is seat for asked in self._arrived)

    def _staying(self) -> list[Seat]:
        return [seat for seat in self._collecting() if not (seat.untold or seat.leaving)]

    def _may_ask_ahead(self, seat: Seat) -> bool:
        if seat.collecting or not seat.has_a_slab:
            return False
        acknowledged = self._sender.acknowledged(seat.worker_id)
        # Not with the weights of long ago that a new process starts with.
        if not seat.num_requests and acknowledged < self._sent.newest(seat.worker_id):
            return False
        return self._pacer is None or self._pacer.may_ask(seat.worker_id, acknowledged)

    def _request(self, seat: Seat) -> None:
        plan = self._plan
        if not plan.sync and plan.num_frames is not None and self._frames_asked >= plan.num_frames:
            return
        seat.collecting = True
        seat.batch = self._batch
        if plan.sync:
            self._wanted -= 1
        number, seat.num_requests = seat.num_requests, seat.num_requests + 1
        seat.unsettled.add(number)
        self._requests += 1
        seat.last_asked = self._requests
        known = self._sender.acknowledged(seat.worker_id)
        request = CollectRequest(
            plan.num_steps,
            random=self._frames_asked < plan.random_frames,
            fresh=plan.sync,
            version=known,
        )
        self._frames_asked += plan.rollout_frames
        ticket = (
            Ticket(seat.worker_id, known)
            if self._pacer is None
            else self._pacer.ask(seat.worker_id, known)
        )
        asked = Asked(seat, ticket, number, self._epoch, clock_ns())
        seat.open.add(asked)
        answer = self._transport.collect(seat.peer, request)
        self._then(seat, answer, lambda offer: self._offered(asked, offer))
        if plan.sync and self._preempted_batch == self._batch:
            self._preempt()

    def _offered(self, asked: Asked, offer: Offer) -> None:
        seat, header = asked.seat, offer.header
        seat.collecting = False
        if seat.gone:
            offer.decline()  # it was given up when its worker was lost
            return
        self._ledger.announce(
            seat.worker_id,
            seat.incarnation,
            header.sequence,
            header.num_frames,
            stepped=header.stepped,
            lost=header.lost,
        )
        self._book.collected(header, asked.asked_at)
        asked.offer = offer
        pace = self._paces.get(seat.worker_id, Pace())
        took_s = (clock_ns() - asked.asked_at) / 1e9
        self._paces[seat.worker_id] = pace.after(took_s, preempted=asked.preempted)
        lowest, _ = header.policy_version
        if self._pacer is not None:
            self._pacer.arrived(asked.ticket, lowest)
        asked.ticket.version = lowest
        if asked.epoch != self._epoch:
            self._give_up(asked, "given_up")
            return
        self._arrived.append(asked)
        self._fetch_offers()
        share = self._plan.preemptive_threshold
        if share is not None and len(self._arrived) >= math.ceil(share * self._plan.num_rollouts):
            self._preempt()

    def _preempt(self) -> None:
        """Have those that still collect for this batch deliver what they have."""
        self._preempted_batch = self._batch
        for seat in self._seats.values():
            for asked in seat.open:
                if asked.offer is None and not asked.preempted and asked.epoch == self._epoch:
                    asked.preempted = True
                    self._transport.call(seat.peer, "preempt", asked.number)

    def _fetch_offers(self) -> None:
        self._give_up_stale()
        room = self._max_fetched
        for asked in list(self._arrived):
            if asked.rollout is not None or asked.fetching:
                room -= 1
            # Meanwhile it may have been given up: a fetch may be over at once, and lead to more.
            elif (room > 0 or self._drains(asked)) and asked in self._arrived:
                self._fetch(asked)
                room -= 1

    def _drains(self, asked: Asked) -> bool:
        """Whether it is to come here lest its worker, which is to leave, takes it along."""
        return asked.seat.leaving and not self._hands_over

    def _fetch(self, asked: Asked) -> None:
        if not asked.lies_there:
            return
        offer = asked.offer
        assert offer is not None
        asked.fetching = True
        begin = clock_ns()

        def arrived(tensors: Tensors) -> None:
            asked.fetching = False
            header = offer.header
            self._book.fetched(header.worker_id, header.num_bytes, clock_ns() - begin)
            if asked.epoch == self._epoch:
                asked.seat.unsettled.discard(asked.number)
                asked.seat.open.discard(asked)
                asked.rollout = Rollout(offer.header, tensors)
                self._check_drained(asked.seat)
            else:
                self._give_up(asked, "given_up")

        def failed() -> None:
            asked.fetching, asked.failed = False, True
            if asked.seat.gone:
                if asked in self._arrived:
                    self._arrived.remove(asked)
                self._give_up(asked, "worker_lost")

        self._then(asked.seat, offer.fetch(), arrived, failed)

    def _then(
        self,
        seat: Seat,
        answer: Future[T],
        arrived: Callable[[T], None],
        failed: Callable[[], None] | None = None,
    ) -> None:
        """Go on with a worker's answer, under the lock, once it is there."""

        def deliver(done: Future[T]) -> None:
            error = done.exception()
            with self._lock:
                if self._closed:
                    return
                if error is None:
                    arrived(done.result())
                elif failed is not None:
                    failed()
                if error is not None and not seat.gone:
                    # It is lost, or will be: what it owes is given up then.
                    self._reports.report(seat.worker_id, seat.incarnation, error)
                self._ask()
                self._changed.notify_all()

        answer.add_done_callback(deliver)


def _turn(seat: Seat) -> tuple[int, int]:
    return seat.turn, seat.worker_id


def _origin(rollout: Rollout) -> tuple[int, int, int]:
    header = rollout.header
    return header.worker_id, header.incarnation, header.sequence
