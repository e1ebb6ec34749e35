"""Every rollout that was requested: where it is, and at its end what became of it.

Pure bookkeeping. One function changes where a rollout is, until the user has it; all else (who
collects, what waits for delivery, whose memory is free) follows from that::

    COLLECTING ─▶ PREEMPTED ─▶ READY ─▶ FETCHING ─▶ HERE ─▶ DELIVERED
        └───────────────────────▲ └──▶ KEPT ─────────────────▲

A rollout that is being collected or fetched becomes UNWANTED if nobody is to get it, and from all
of these states it may be GIVEN_UP.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Iterator
from itertools import chain
from math import ceil

from distcollect.config import Staleness
from distcollect.pool.ledger import Ledger
from distcollect.pool.staleness import Pacer, SentVersions
from distcollect.pool.worker_slots import (
    WAITING,
    BatchPlan,
    RolloutRequest,
    RolloutState,
    WorkerSlot,
    WorkerSlots,
)
from distcollect.results import WorkerThroughput
from distcollect.rollout.header import Header
from distcollect.rollout.layout import Tensors
from distcollect.transport.protocol import CollectRequest, Offer

log = logging.getLogger(__name__)

_R = RolloutState
# Rollouts dropped in a row after which a worker is taken to deliver nothing.
_STUCK = 10
_SETTLED = (_R.DELIVERED, _R.GIVEN_UP)


class Requests:
    """Every rollout that was requested, until it is settled; that is once, and in the ledger.

    Attributes:
        plan: what a rollout is.
        slots: the workers.
        versions: which weights were sent to which worker.
        among: the rollouts in each state, in the order in which they entered it.
        ledger: where all frames went.
        stale_frames: frames that were given up as too stale, by worker_id.
        frames_asked: frames of the rollouts that were requested, without those given up.
        num_requested: how many were requested in all.
        num_batches: how many batches the user has asked for.
        before_batch: how many rollouts had been requested when it asked for the last one.
    """

    def __init__(
        self,
        plan: BatchPlan,
        slots: WorkerSlots,
        versions: SentVersions,
        *,
        pacer: Pacer | None = None,
    ) -> None:
        """Start without any request.

        ``pacer``: knows the rollouts that are out, if it decides how many may be.
        """
        self.stale_frames: dict[int, int] = {}
        self.frames_asked = self._frames_before_batch = 0
        self.num_requested = self.num_batches = self.before_batch = 0
        self.plan, self.slots, self.versions = plan, slots, versions
        self._pacer = pacer
        # Not plain dicts: finding the first key of one takes time when many were removed.
        self.among: dict[RolloutState, OrderedDict[RolloutRequest, None]] = {
            state: OrderedDict() for state in RolloutState if state not in _SETTLED
        }
        self._num_arrived = 0
        self.ledger = Ledger()
        self._throughput: dict[int, WorkerThroughput] = {}
        # (worker_id, incarnation) of a process that is gone: frames of its unanswered requests.
        self._unaccounted: dict[tuple[int, int], int] = {}
        # By worker_id, the versions of its rollouts that were too old since one was delivered;
        # None: it was warned of.
        self._too_old: dict[int, list[int] | None] = {}

    # Where rollouts are.

    @property
    def num_open(self) -> int:
        """The number of rollouts that are neither delivered nor given up."""
        return sum(map(len, self.among.values()))

    @property
    def num_collecting(self) -> int:
        """The number of workers at work. A rollout that nobody gets may be on its way instead."""
        among = self.among
        return len(among[_R.COLLECTING]) + len(among[_R.PREEMPTED]) + len(among[_R.UNWANTED])

    @property
    def num_fetched(self) -> int:
        """The number of rollouts on the trainer or on their way to it."""
        return len(self.among[_R.FETCHING]) + len(self.among[_R.HERE])

    @property
    def num_waiting(self) -> int:
        """The number of rollouts that wait for delivery."""
        return self.num_fetched + len(self.among[_R.READY])

    @property
    def num_left(self) -> int:
        """The number of rollouts that are still to be requested in the run; it may be endless."""
        if self.plan.num_frames is None:
            return 1 << 60
        return max(0, ceil((self.plan.num_frames - self.frames_asked) / self.plan.rollout_frames))

    def waiting(self) -> Iterator[RolloutRequest]:
        """The rollouts that wait for delivery, in no order."""
        return chain(*[self.among[state] for state in WAITING])

    def _become(self, request: RolloutRequest, state: RolloutState) -> None:
        """Change where a rollout is."""
        del self.among[request.state][request]
        request.state = state
        if state in _SETTLED:
            request.slot.rollouts.remove(request)
        else:
            self.among[state][request] = None
        if state is not _R.FETCHING:
            self.slots.refresh(request.slot)

    # From the request to the rollout.

    def begin_batch(self) -> None:
        """The user asks for a batch."""
        self.num_batches += 1
        self.before_batch, self._frames_before_batch = self.num_requested, self.frames_asked

    def request(self, slot: WorkerSlot) -> RolloutRequest:
        """A worker's next rollout is requested."""
        plan, version = self.plan, self.versions.acknowledged(slot.worker_id)
        frames = self._frames_before_batch if plan.sync else self.frames_asked
        random = frames < plan.random_frames  # so the number of workers makes no difference
        wire_request = CollectRequest(
            plan.num_steps, random, fresh=plan.sync, version=version, frames=frames
        )
        request = RolloutRequest(slot.worker_id, version, slot, slot.num_requests, wire_request)
        self.frames_asked += plan.rollout_frames
        self.num_requested += 1
        slot.num_requests += 1
        slot.last_request = self.num_requested
        slot.rollouts.append(request)
        self.among[request.state][request] = None
        self.slots.refresh(slot)
        if self._pacer is not None:
            self._pacer.ask(request)
        return request

    def preempt_all(self) -> list[RolloutRequest]:
        """End the rollouts that are still collected; returns these."""
        ended = list(self.among[_R.COLLECTING])
        for request in ended:
            self._become(request, _R.PREEMPTED)
        return ended

    def offered(self, request: RolloutRequest, offer: Offer, now: int) -> None:
        """It lies on its worker since ``now``, in nanoseconds."""
        header, before = offer.header, request.state
        if before is _R.GIVEN_UP:  # when its worker was lost
            offer.decline()
            return
        self.ledger.announce(header)
        request.header, request.offer = header, offer
        self._measure(request, (now - request.asked_at) / 1e9)
        lowest, _ = header.policy_version
        if self._pacer is not None:
            self._pacer.arrived(request, lowest)
        request.version = lowest
        if before is _R.UNWANTED:
            self.give_up(request, "given_up")
            return
        request.arrival = self._num_arrived
        self._num_arrived += 1
        self._become(request, _R.READY)

    def _measure(self, request: RolloutRequest, took_s: float) -> None:
        num, mean_s, num_preempted = self._throughput.get(request.worker_id, (0, 0.0, 0))
        self._throughput[request.worker_id] = WorkerThroughput(
            num + 1,
            mean_s + (took_s - mean_s) / (num + 1),
            num_preempted + (request.state is _R.PREEMPTED),
        )

    def fetch(self, request: RolloutRequest) -> Offer:
        """It is moved here, by the offer that is returned."""
        offer, request.offer = request.offer, None
        assert offer is not None
        self._become(request, _R.FETCHING)
        return offer

    def fetched(self, request: RolloutRequest, tensors: Tensors) -> None:
        """It is here."""
        if request.state is _R.UNWANTED:
            self.give_up(request, "given_up")
        elif request.state is _R.FETCHING:
            request.tensors = tensors
            self._become(request, _R.HERE)

    def not_fetched(self, request: RolloutRequest) -> None:
        """It can't be fetched; it is given up when its worker is lost."""
        if request.state is _R.UNWANTED:
            self.give_up(request, "given_up")
        elif request.state is _R.FETCHING and request.slot.is_gone:
            self.give_up(request, "worker_lost")

    def keep(self, request: RolloutRequest, key: str) -> None:
        """Its worker is to keep it for whichever trainer shows this key."""
        assert request.offer is not None
        request.offer.decline()
        request.key, request.offer = key, None
        self._become(request, _R.KEPT)

    # The end of a request.

    def deliver(self, request: RolloutRequest) -> None:
        """The user gets it; of one that is kept for other trainers, the reference."""
        if request.state is _R.KEPT:
            request.is_referred = True
        else:
            self._become(request, _R.DELIVERED)
        if too_old := self._too_old.get(request.worker_id):
            too_old.clear()
        if self._pacer is not None:
            self._pacer.delivered(request)
        request.slot.turn += 1

    def settle_delivered(self, request: RolloutRequest, cause: str | None) -> None:
        """The user has one that was delivered; or it is lost by ``cause``, before that."""
        key = origin(request.known_header)
        if cause is None:
            self.ledger.deliver(*key)
            return
        request.state = _R.GIVEN_UP
        self.ledger.lose(*key, cause)
        self.ask_again()

    def ask_again(self) -> None:
        """Count one less as requested, as nobody gets it: another one is to be collected."""
        self.frames_asked -= self.plan.rollout_frames

    def keep_no_longer(self, request: RolloutRequest, cause: str | None) -> None:
        """Another trainer has it, or it is lost for ``cause``."""
        if cause is not None:
            self.give_up(request, cause)
            return
        self._become(request, _R.DELIVERED)
        self.ledger.deliver(*origin(request.known_header))

    def give_up(self, request: RolloutRequest, cause: str) -> None:
        """Nobody gets it; the frames that are known of it are lost by ``cause``."""
        self._become(request, _R.GIVEN_UP)
        header = request.header
        if header is not None:
            self.ledger.lose(*origin(header), cause)
            if cause == "stale":
                self._note_stale(request, header.num_frames)
        if request.offer is not None:
            request.offer.decline()
        request.offer = request.tensors = None
        if request.is_referred:
            return  # it was the user's
        self.ask_again()
        if self._pacer is not None:
            self._pacer.given_up(request)

    def _note_stale(self, request: RolloutRequest, num_frames: int) -> None:
        """Count it; warn once of a worker whose rollouts are all too old."""
        worker_id, version = request.worker_id, request.version
        self.stale_frames[worker_id] += num_frames
        versions = self._too_old.setdefault(worker_id, [])
        if versions is None:
            return
        versions.append(version)
        if len(versions) < _STUCK:
            return
        self._too_old[worker_id] = None
        if versions[_STUCK // 2] == version:
            why = (
                f"it still has version {version} of the weights. Does its WeightUpdater "
                "leave it out? update_policy_weights_(...).left_out says why a worker does not get "
                "them"
            )
        else:
            waits = "" if self._pacer else "mode='pace', which waits for slow workers, or "
            why = (
                "more versions are published while it collects one than Staleness allows. Use "
                f"{waits}a higher bound, publish less often, or make rollouts shorter "
                "(frames_per_batch)"
            )
        log.warning(
            "%d rollouts in a row of worker %d were dropped as too old: %s",
            *(_STUCK, worker_id, why),
        )

    def is_stale(self, request: RolloutRequest, bound: Staleness) -> bool:
        """Return True if it waits for delivery and is older than ``bound`` allows."""
        # One that is being fetched is looked at again when it is here.
        is_waiting = request.state in (_R.READY, _R.HERE)
        return is_waiting and self.versions.slack(bound, request.worker_id, request.version) < 0

    def give_up_stale(self, bound: Staleness) -> None:
        """Give up what is older than that."""
        for request in list(self.waiting()):
            if self.is_stale(request, bound):
                self.give_up(request, "stale")

    def give_up_all(self) -> None:
        """Deliver nothing that was requested until now."""
        for state in (_R.COLLECTING, _R.PREEMPTED, _R.FETCHING):
            for request in list(self.among[state]):
                self._become(request, _R.UNWANTED)
        for request in list(self.waiting()):
            self.give_up(request, "given_up")

    # The end of a worker.

    def vacate(self, slot: WorkerSlot) -> None:
        """A worker is gone, and with it what is neither here nor on its way here."""
        self._note_unknown(slot)
        for request in list(slot.rollouts):
            # Of others that are on their way, or kept, an answer will come, or fail.
            is_lost = request.state is _R.FETCHING and slot.failed
            if request.header is None or request.state is _R.READY or is_lost:
                self.give_up(request, "worker_lost")

    def _note_unknown(self, slot: WorkerSlot) -> None:
        """Count the frames that a worker may have stepped without a header that says so."""
        unknown = self.plan.rollout_frames * self.plan.skew if slot.is_collecting else 0
        self._unaccounted[slot.worker_id, slot.incarnation] = unknown

    def account(self, worker_id: int, incarnation: int, cause: str, stepped: int | None) -> None:
        """Settle the frames of a process that is gone."""
        at_most = self._unaccounted.pop((worker_id, incarnation), 0)
        self.ledger.end(worker_id, incarnation, cause, stepped=stepped, at_most=at_most)

    def close(self) -> None:
        """Deliver nothing more; answers of workers are ignored from now on."""
        # Also rollouts that are on their way here, whether anybody wants them or not.
        self.ledger.lose_waiting("shut_down")
        for slot in self.slots:
            self._note_unknown(slot)
            slot.rollouts.clear()
        for requests in self.among.values():
            requests.clear()

    # What is known.

    @property
    def paces(self) -> dict[int, WorkerThroughput]:
        """The speed of each worker, by worker_id."""
        return dict(sorted(self._throughput.items()))

    @property
    def num_ready(self) -> dict[int, int]:
        """worker_id to how many of its rollouts wait for delivery; without those that have none."""
        return dict(Counter(request.worker_id for request in self.waiting()))


def origin(header: Header) -> tuple[int, int, int]:
    """Return what identifies a rollout in the run: worker_id, incarnation, sequence."""
    return header[:3]
