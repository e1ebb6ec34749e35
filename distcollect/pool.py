"""The trainer's side of all workers: asks for rollouts, gathers them, pushes weights.

In sync mode a batch is asked for when the user asks for it: one rollout of every worker. In async
mode each worker always has a request open, so that it collects the next rollout while the last is
being fetched; rollouts are handed on first come, first served.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import torch

from .errors import BatchTimeout, CollectorStateError, DeadlineError, WorkerError, WorkerLost
from .rollout import Rollout, Tensors
from .threads import LOOK_UP_S, arrives
from .transport import CollectRequest, Offer, Transport
from .weights import PushHandle, WeightSender

# Rollouts that lie fetched, or are being fetched, before the user asks: one is on its way while
# the user works on another. More would only make them older.
_PREFETCH = 2
# A worker has two slabs: one is read from while the other is written to.
_SLABS_PER_WORKER = 2
_SEED_TIMEOUT_S = 60.0


@dataclass
class _Seat:
    """What the pool knows of a worker: what was asked of it and is not settled."""

    peer: int
    collecting: bool = False
    busy_slabs: int = 0


class Pool:
    """Gathers rollouts from a set of workers, and orders weights before rollouts.

    Attributes:
        version: policy_version of the newest publication.
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
            explain: (worker_id, error) to an error that says more than the transport can.
        """
        self.version = 0
        self._transport = transport
        self._seats = {worker_id: _Seat(peer) for worker_id, peer in sorted(peers.items())}
        self._sender = sender
        self._sync = sync
        self._num_steps = num_steps
        self._rollout_frames = rollout_frames
        self._random_frames = random_frames
        self._num_frames = num_frames
        self._explain = explain
        self._changed = threading.Condition()
        self._offers: deque[tuple[int, Offer]] = deque()
        self._fetching = 0
        self._fetched: deque[Rollout] = deque()
        self._max_fetched = len(self._seats) if sync else _PREFETCH
        self._frames_asked = 0
        self._epoch = 0  # how often all that was asked for was given up
        self._wanted: set[int] = set()  # in sync mode: who has not been asked yet for this batch
        self._seeding = False
        self._failed: tuple[int, BaseException] | None = None
        self._closed = False
        self._pushes: list[PushHandle] = []

    @property
    def worker_ids(self) -> tuple[int, ...]:
        """The workers' ids in order."""
        return tuple(self._seats)

    def gather_all(self, timeout_s: float) -> list[Rollout]:
        """One fresh rollout of every worker, in the order of their ids.

        Raises:
            BatchTimeout: not all within ``timeout_s``; names the workers waited for.
            WorkerError: one of them failed.
        """
        # A push that nobody waited for has to have arrived before collection starts.
        for push in self._pushes:
            push.wait()
        self._pushes.clear()
        with self._changed:
            self._check()
            self._wanted = set(self._seats)
            self._ask()
            try:
                self._wait(lambda: len(self._fetched) == len(self._seats), timeout_s)
            except BatchTimeout:
                # What comes of it later would be older than the next batch's question.
                self._give_up_all()
                raise
            rollouts = {rollout.header.worker_id: rollout for rollout in self._fetched}
            self._fetched.clear()
        return [rollouts[worker_id] for worker_id in self._seats]

    def gather_next(self, timeout_s: float) -> Rollout:
        """The next rollout of whichever worker; all go on collecting meanwhile.

        Raises: as :meth:`gather_all`.
        """
        with self._changed:
            self._check()
            self._ask()
            self._wait(lambda: bool(self._fetched), timeout_s)
            rollout = self._fetched.popleft()
            self._fetch_offers()
        return rollout

    def seed(self, seed: int, num_envs: int, *, static_seed: bool) -> None:
        """Seed every worker; its next rollout starts with a reset.

        Env i of all gets the i-th seed drawn from ``seed``, or with ``static_seed`` all the same.
        Rollouts from before are given up.

        Raises:
            DeadlineError: a worker took no seed in time.
            WorkerError: one of them failed.
        """
        with self._changed:
            self._check()
            self._seeding = True
            self._give_up_all()
        answers: dict[int, Future[None]] = {}
        for index, (worker_id, seat) in enumerate(self._seats.items()):
            first = index * num_envs
            seeds = [env_seed(seed, 0 if static_seed else first + row) for row in range(num_envs)]
            answers[worker_id] = self._transport.call(
                seat.peer, "seed", seeds, env_seed(seed, first, stream=1)
            )
        for worker_id, answer in answers.items():
            if not arrives(answer, _SEED_TIMEOUT_S):
                raise DeadlineError(f"worker {worker_id} took no seed within {_SEED_TIMEOUT_S:g} s")
            answer.result()
        # Calls may overtake each other on their way, so only now is what is asked for seeded.
        self._seeding = False

    def _give_up_all(self) -> None:
        """Take no rollout that was asked for until now."""
        self._epoch += 1
        self._wanted.clear()
        for worker_id, offer in self._offers:
            offer.decline()
            self._give_up(worker_id)
        self._offers.clear()
        self._frames_asked -= self._rollout_frames * len(self._fetched)
        self._fetched.clear()

    def _give_up(self, worker_id: int) -> None:
        self._seats[worker_id].busy_slabs -= 1
        self._frames_asked -= self._rollout_frames

    def push(
        self, flat: torch.Tensor, worker_ids: Sequence[int] | None = None, backend: str = "gloo"
    ) -> PushHandle:
        """Publish a new version and send it.

        Args:
            flat: the snapshot, uint8; must not change any more.
            worker_ids: to whom; None: to all.
            backend: "gloo" or "nccl".
        """
        with self._changed:
            self._check()
        self.version += 1
        selected = self._seats if worker_ids is None else worker_ids
        peers = {worker_id: self._seats[worker_id].peer for worker_id in selected}
        handle = self._sender.push(flat, self.version, peers, backend)
        self._pushes = [push for push in self._pushes if not push.done()] + [handle]
        return handle

    def close(self) -> None:
        """Ask for nothing more; who waits is woken with an error."""
        with self._changed:
            self._closed = True
            self._offers.clear()
            self._fetched.clear()
            self._changed.notify_all()

    def lose(self, worker_id: int) -> None:
        """Report that a worker is lost."""
        self._fail(worker_id, WorkerLost("is lost"))

    def _fail(self, worker_id: int, error: BaseException) -> None:
        """What the next wait, or the present one, raises. The first error counts."""
        with self._changed:
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

    def _wait(self, ready: Callable[[], bool], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not ready():
            self._check()
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                late = [worker_id for worker_id, seat in self._seats.items() if seat.collecting]
                raise BatchTimeout(
                    f"no batch within {timeout_s:g} s; waited for workers {late}. "
                    "Faults(batch_timeout_s=...) gives them longer"
                )
            self._changed.wait(min(remaining, LOOK_UP_S))

    def _ask(self) -> None:
        """Ask whoever can be asked for a rollout; called whenever that may have changed."""
        if self._seeding:
            return
        for worker_id, seat in self._seats.items():
            if self._sync:
                if worker_id in self._wanted and not seat.busy_slabs:
                    self._wanted.discard(worker_id)
                    self._request(worker_id)
            elif not seat.collecting and seat.busy_slabs < _SLABS_PER_WORKER:
                self._request(worker_id)

    def _request(self, worker_id: int) -> None:
        if self._num_frames is not None and self._frames_asked >= self._num_frames:
            return
        seat = self._seats[worker_id]
        seat.collecting = True
        seat.busy_slabs += 1
        request = CollectRequest(
            self._num_steps, random=self._frames_asked < self._random_frames, fresh=self._sync
        )
        self._frames_asked += self._rollout_frames
        epoch = self._epoch

        def arrived(answer: Future[Offer]) -> None:
            error = answer.exception()
            if error is not None:
                self._fail(worker_id, error)
                return
            with self._changed:
                if self._closed:
                    return
                seat.collecting = False
                if epoch == self._epoch:
                    self._offers.append((worker_id, answer.result()))
                    self._fetch_offers()
                else:
                    answer.result().decline()
                    self._give_up(worker_id)
                self._ask()

        self._transport.collect(seat.peer, request).add_done_callback(arrived)

    def _fetch_offers(self) -> None:
        while self._offers and self._fetching + len(self._fetched) < self._max_fetched:
            worker_id, offer = self._offers.popleft()
            self._fetching += 1
            self._fetch(worker_id, offer)

    def _fetch(self, worker_id: int, offer: Offer) -> None:
        epoch = self._epoch

        def arrived(answer: Future[Tensors]) -> None:
            error = answer.exception()
            if error is not None:
                self._fail(worker_id, error)
                return
            with self._changed:
                if self._closed:
                    return
                self._fetching -= 1
                if epoch == self._epoch:
                    self._seats[worker_id].busy_slabs -= 1
                    self._fetched.append(Rollout(offer.header, answer.result()))
                    self._changed.notify_all()
                else:
                    self._give_up(worker_id)
                self._ask()

        offer.fetch().add_done_callback(arrived)


def env_seed(seed: int, index: int, stream: int = 0) -> int:
    """The seed of env ``index``: independent of how the envs are spread over workers."""
    return int(np.random.SeedSequence([seed, stream, index]).generate_state(1)[0])
