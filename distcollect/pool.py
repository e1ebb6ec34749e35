"""The trainer's side of all workers: asks for rollouts, gathers them, pushes weights.

In sync mode a batch is asked for when the user asks for it: one rollout of every worker. In async
mode each worker always has a request open, so that it collects the next rollout while the last is
being fetched; rollouts are handed on first come, first served, unless staleness is bounded.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch

from .config import Staleness
from .errors import (
    BatchTimeout,
    CollectorStateError,
    DeadlineError,
    DistCollectError,
    WorkerError,
    WorkerLost,
)
from .handle import PushHandle
from .rollout import Rollout, Tensors
from .schedule import Pacer, SentVersions, Ticket
from .threads import LOOK_UP_S, missing
from .transport import NUM_SLABS, CollectRequest, Offer, Transport
from .weights import WeightSender

T = TypeVar("T")

# Rollouts that lie fetched, or are being fetched, before the user asks: one is on its way while
# the user works on another. More would only make them older.
_PREFETCH = 2


@dataclass
class _Seat:
    """What the pool knows of a worker.

    Its n-th rollout lies in slab n modulo NUM_SLABS, so it may be asked for the next one as soon as
    the one before the last is settled, whatever has become of the last.

    Attributes:
        peer: its process.
        collecting: a request is open.
        num_requests: rollouts asked for.
        unsettled: of these, the numbers of those whose slab is still to be read.
        last_asked: when, in requests of the pool.
    """

    peer: int
    collecting: bool = False
    num_requests: int = 0
    unsettled: set[int] = field(default_factory=set)
    last_asked: int = 0

    @property
    def has_a_slab(self) -> bool:
        """Whether there is memory for one more rollout."""
        return self.num_requests - min(self.unsettled, default=self.num_requests) < NUM_SLABS


@dataclass(eq=False)
class _Asked:
    """A rollout that was asked for.

    Attributes:
        ticket: whose it is, and its lowest version as far as that is known.
        number: which of that worker's rollouts.
        epoch: when it was asked for.
        offer: once it lies ready on its worker.
        rollout: once it is here.
    """

    ticket: Ticket
    number: int
    epoch: int
    offer: Offer | None = None
    fetching: bool = False
    rollout: Rollout | None = None


class Pool:
    """Gathers rollouts from a set of workers, and orders weights before rollouts.

    Attributes:
        version: policy_version of the newest publication.
        stale_frames: frames that were given up as too stale, by worker_id.
    """

    def __init__(
        self,
        transport: Transport,
        peers: Mapping[int, int],
        sender: WeightSender,
        *,
        sync: bool,
        num_steps: int,
        rollout_frames: int,
        random_frames: int = 0,
        num_frames: int | None = None,
        staleness: Staleness | None = None,
        explain: Callable[[int, WorkerError], WorkerError] | None = None,
    ) -> None:
        """Drive the workers in ``peers``.

        Args:
            transport: reaches them.
            peers: ``{worker_id: peer}``.
            sender: for weights.
            sync: whether batches are asked for with :meth:`gather_all` or :meth:`gather_next`.
            num_steps: T of every rollout.
            rollout_frames: n * T.
            random_frames: so many frames at the start have random actions (whole rollouts).
            num_frames: ask for no more frames than this; None: endless.
            staleness: which frames are too old, and what becomes of them.
            explain: (worker_id, error) to an error that says more than the transport can.
        """
        self.version = 0
        self.stale_frames = dict.fromkeys(sorted(peers), 0)
        self._transport = transport
        self._seats = {worker_id: _Seat(peer) for worker_id, peer in sorted(peers.items())}
        self._sender = sender
        self._sync = sync
        self._num_steps = num_steps
        self._rollout_frames = rollout_frames
        self._random_frames = random_frames
        self._num_frames = num_frames
        self._explain = explain
        self._sent = SentVersions()
        self._max_lag: int | None = None  # of what is handed on
        self._pacer: Pacer | None = None
        if staleness is not None and staleness.mode != "mask":
            self._max_lag = staleness.max_policy_lag
            if staleness.mode == "pace" and not sync:
                self._pacer = Pacer(staleness.max_policy_lag, self._sent)
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._arrived: list[_Asked] = []  # those that lie ready, there or here, in that order
        self._max_fetched = len(self._seats) if sync else _PREFETCH
        self._frames_asked = 0
        self._requests = 0
        self._epoch = 0  # how often all that was asked for was given up
        self._wanted: set[int] = set()  # in sync mode: who has not been asked yet for this batch
        self._seeding = False
        self._failed: tuple[int, BaseException] | None = None
        self._closed = False
        sender.on_acknowledged = self._acknowledged
        sender.on_left_out = self._left_out

    @property
    def worker_ids(self) -> tuple[int, ...]:
        """The workers' ids in order."""
        return tuple(self._seats)

    @property
    def acknowledged(self) -> dict[int, int]:
        """worker_id to the newest version that it has."""
        return {worker_id: self._sender.acknowledged(worker_id) for worker_id in self._seats}

    def lag(self, worker_id: int, version: int) -> int:
        """How many versions newer than ``version`` were sent to a worker."""
        return self._sent.lag(worker_id, version)

    def gather_all(self, timeout_s: float) -> list[Rollout]:
        """One fresh rollout of every worker, in the order of their ids.

        A worker collects once it has the newest weights that were sent to it.

        Raises:
            BatchTimeout: not all within ``timeout_s``; names the workers waited for.
            WorkerError: one of them failed.
        """
        with self._lock:
            self._check()
            self._wanted = set(self._seats)
            self._ask()
            try:
                self._wait(self._all_are_here, timeout_s)
            except BaseException:  # Ctrl-C as well
                # What comes of it later would be older than the next batch's question.
                self._give_up_all()
                raise
            rollouts = {rollout.header.worker_id: rollout for rollout in self._here()}
            self._arrived.clear()
        return [rollouts[worker_id] for worker_id in self._seats]

    def gather_next(self, timeout_s: float) -> Rollout:
        """The next rollout of whichever worker; all go on collecting meanwhile.

        Raises: as :meth:`gather_all`.
        """
        with self._lock:
            self._check()
            if self._pacer is not None:
                self._pacer.awaited()
            self._ask()
            chosen = self._wait(self._choose, timeout_s)
            assert chosen.rollout is not None
            self._arrived.remove(chosen)
            if self._pacer is not None:
                self._pacer.delivered(chosen.ticket)
            self._fetch_offers()
            self._ask()
        return chosen.rollout

    def _all_are_here(self) -> bool:
        self._give_up_stale()
        return len(self._here()) == len(self._seats)

    def _here(self) -> list[Rollout]:
        return [asked.rollout for asked in self._arrived if asked.rollout is not None]

    def _choose(self) -> _Asked | None:
        """What is to be handed on next, if it is here."""
        self._fetch_offers()
        if self._pacer is None:
            return next((asked for asked in self._arrived if asked.rollout is not None), None)
        ticket = self._pacer.choose([asked.ticket for asked in self._arrived])
        if ticket is None:
            return None
        chosen = next(asked for asked in self._arrived if asked.ticket is ticket)
        self._fetch(chosen)
        return chosen if chosen.rollout is not None else None

    def seed(self, seed: int, num_envs: int, *, static_seed: bool, timeout_s: float) -> None:
        """Seed every worker; its next rollout starts with a reset.

        Env i of all gets the i-th seed drawn from ``seed``, or with ``static_seed`` all the same.
        Rollouts from before are given up.

        Raises:
            DeadlineError: some took no seed in time; names them.
            WorkerError: one of them failed.
        """
        with self._lock:
            self._check()
            self._seeding = True
            self._give_up_all()
        try:
            self._seed(seed, num_envs, static_seed=static_seed, timeout_s=timeout_s)
        finally:
            # Calls may overtake each other on their way, so only now is what is asked for seeded.
            self._seeding = False

    def _seed(self, seed: int, num_envs: int, *, static_seed: bool, timeout_s: float) -> None:
        answers: dict[int, Future[None]] = {}
        for index, (worker_id, seat) in enumerate(self._seats.items()):
            first = index * num_envs
            seeds = [env_seed(seed, 0 if static_seed else first + row) for row in range(num_envs)]
            answers[worker_id] = self._transport.call(
                seat.peer, "seed", seeds, env_seed(seed, first, stream=1)
            )
        if late := missing(answers, timeout_s):
            raise DeadlineError(f"workers {late} took no seed within {timeout_s:g} s")
        for answer in answers.values():
            answer.result()

    def _give_up_all(self) -> None:
        """Take no rollout that was asked for until now."""
        self._epoch += 1
        self._wanted.clear()
        for asked in list(self._arrived):
            self._arrived.remove(asked)
            # One that is being fetched is settled when it arrives.
            if not asked.fetching:
                self._give_up(asked)

    def _give_up(self, asked: _Asked) -> None:
        """Settle a rollout that is not handed on."""
        self._seats[asked.ticket.worker_id].unsettled.discard(asked.number)
        if asked.rollout is None and asked.offer is not None:
            asked.offer.decline()
        self._frames_asked -= self._rollout_frames
        if self._pacer is not None:
            self._pacer.given_up(asked.ticket)

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
            worker_id = asked.ticket.worker_id
            self.stale_frames[worker_id] += self._rollout_frames
            self._give_up(asked)
            if self._sync:
                self._wanted.add(worker_id)
        if stale:
            self._ask()

    def push(self, flat: torch.Tensor, worker_ids: Sequence[int] | None = None) -> PushHandle:
        """Publish a new version and send it.

        Args:
            flat: the snapshot, uint8; must not change any more.
            worker_ids: to whom; None: to all.
        """
        selected = tuple(self._seats) if worker_ids is None else tuple(worker_ids)
        with self._lock:
            self._check()
            self.version += 1
            self._sent.publish(self.version, selected)
            if self._pacer is not None:
                self._pacer.published()
            # Under the lock, so that versions come to the sender in their order.
            return self._sender.publish(flat, self.version, selected)

    def _acknowledged(self, worker_id: int, version: int) -> None:
        with self._lock:
            if not self._closed and self._failed is None:
                self._ask()

    def _left_out(self, worker_id: int, error: DistCollectError) -> None:
        # In sync mode it must not go on with what it has.
        if self._sync:
            self._fail(worker_id, error)

    def close(self) -> None:
        """Ask for nothing more; who waits is woken with an error."""
        with self._lock:
            self._closed = True
            self._arrived.clear()
            self._changed.notify_all()
        self._sender.close()

    def lose(self, worker_id: int) -> None:
        """Report that a worker is lost."""
        self._fail(worker_id, WorkerLost("is lost"))
        self._sender.forget(worker_id)

    def _fail(self, worker_id: int, error: BaseException) -> None:
        """What the next wait, or the present one, raises. The first error counts."""
        with self._lock:
            if self._failed is None:
                self._failed = (worker_id, error)
            self._changed.notify_all()

    def _check(self) -> None:
        if self._closed:
            raise CollectorStateError("the collector was shut down")
        if self._failed is not None:
            worker_id, error = self._failed
            if self._explain is not None and isinstance(error, WorkerError):
                error = self._explain(worker_id, error)
            raise error

    def _wait(self, ready: Callable[[], T | None], timeout_s: float) -> T:
        """Wait until ``ready`` gives something, and give it."""
        deadline = time.monotonic() + timeout_s
        while not (result := ready()):
            self._check()
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise BatchTimeout(
                    f"no batch within {timeout_s:g} s; waited for {self._awaited()}. "
                    "Faults(batch_timeout_s=...) gives them longer"
                )
            self._changed.wait(min(remaining, LOOK_UP_S))
        return result

    def _awaited(self) -> str:
        """Whom we wait for, in words."""
        late = [worker_id for worker_id, seat in self._seats.items() if seat.unsettled]
        behind = [w for w in self._seats if not self._is_up_to_date(w) and w not in late]
        if behind and (self._sync or not late):
            late_too = f"workers {late} and for " if late else ""
            return f"{late_too}workers {behind} to acknowledge the newest weights sent to them"
        return f"workers {late}"

    def _is_up_to_date(self, worker_id: int) -> bool:
        return self._sender.acknowledged(worker_id) >= self._sent.newest(worker_id)

    def _ask(self) -> None:
        """Ask whoever can be asked for a rollout; called whenever that may have changed."""
        if self._seeding:
            return
        # Who has waited longest comes first: a bound on staleness may not leave room for all.
        for worker_id in sorted(self._seats, key=lambda w: self._seats[w].last_asked):
            seat = self._seats[worker_id]
            if self._sync:
                if (
                    worker_id in self._wanted
                    and not seat.unsettled
                    and self._is_up_to_date(worker_id)
                ):
                    self._wanted.discard(worker_id)
                    self._request(worker_id)
            elif (
                not seat.collecting
                and seat.has_a_slab
                and (
                    self._pacer is None
                    or self._pacer.may_ask(worker_id, self._sender.acknowledged(worker_id))
                )
            ):
                self._request(worker_id)

    def _request(self, worker_id: int) -> None:
        if self._num_frames is not None and self._frames_asked >= self._num_frames:
            return
        seat = self._seats[worker_id]
        seat.collecting = True
        number, seat.num_requests = seat.num_requests, seat.num_requests + 1
        seat.unsettled.add(number)
        self._requests += 1
        seat.last_asked = self._requests
        request = CollectRequest(
            self._num_steps, random=self._frames_asked < self._random_frames, fresh=self._sync
        )
        self._frames_asked += self._rollout_frames
        known = self._sender.acknowledged(worker_id)
        ticket = (
            Ticket(worker_id, known) if self._pacer is None else self._pacer.ask(worker_id, known)
        )
        asked = _Asked(ticket, number, self._epoch)

        def arrived(offer: Offer) -> None:
            seat.collecting = False
            asked.offer = offer
            lowest, _ = offer.header.policy_version
            if self._pacer is not None:
                self._pacer.arrived(ticket, lowest)
            ticket.version = lowest
            if asked.epoch == self._epoch:
                self._arrived.append(asked)
                self._fetch_offers()
                self._changed.notify_all()
            else:
                self._give_up(asked)

        self._then(worker_id, self._transport.collect(seat.peer, request), arrived)

    def _fetch_offers(self) -> None:
        self._give_up_stale()
        room = self._max_fetched
        for asked in list(self._arrived):
            if asked.rollout is not None or asked.fetching:
                room -= 1
            # Meanwhile it may have been given up: a fetch may be over at once, and lead to more.
            elif room > 0 and asked in self._arrived:
                self._fetch(asked)
                room -= 1

    def _fetch(self, asked: _Asked) -> None:
        offer = asked.offer
        if offer is None or asked.fetching or asked.rollout is not None:
            return
        asked.fetching = True
        worker_id = asked.ticket.worker_id

        def arrived(tensors: Tensors) -> None:
            asked.fetching = False
            if asked.epoch == self._epoch:
                self._seats[worker_id].unsettled.discard(asked.number)
                asked.rollout = Rollout(offer.header, tensors)
                self._changed.notify_all()
            else:
                self._give_up(asked)

        self._then(worker_id, offer.fetch(), arrived)

    def _then(self, worker_id: int, answer: Future[T], arrived: Callable[[T], None]) -> None:
        """Go on with a worker's answer, under the lock, once it is there."""

        def deliver(done: Future[T]) -> None:
            error = done.exception()
            if error is not None:
                self._fail(worker_id, error)
                return
            with self._lock:
                if not self._closed:
                    arrived(done.result())
                    self._ask()

        answer.add_done_callback(deliver)


def env_seed(seed: int, index: int, stream: int = 0) -> int:
    """The seed of env ``index``: independent of how the envs are spread over workers."""
    return int(np.random.SeedSequence([seed, stream, index]).generate_state(1)[0])
