"""What workers were asked for, and what became of it: delivered, or given up and why.

Pure bookkeeping, with the ledger that comes of it: nothing here locks or moves a rollout; the
caller does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from distcollect.results import LedgerReport, WorkerThroughput
from distcollect.rollout.header import Header, Rollout
from distcollect.rollout.layout import Tensors
from distcollect.trainer.ledger import Ledger
from distcollect.trainer.scheduler import Scheduler
from distcollect.trainer.staleness import SentVersions
from distcollect.trainer.worker_slots import BatchPlan, RolloutRequest, WorkerSlot, WorkerSlots
from distcollect.transport.protocol import CollectRequest, Offer


class Requests:
    """Every rollout that was asked for, until it is settled; that is once, and in the ledger.

    Attributes:
        arrived: those that lie ready, there or here, in that order.
        stale_frames: frames that were given up as too stale, by worker_id.
    """

    def __init__(
        self,
        plan: BatchPlan,
        slots: WorkerSlots,
        scheduler: Scheduler,
        versions: SentVersions,
        *,
        max_lag: int | None,
        drained: Callable[[int, int], None],
    ) -> None:
        """Nothing was asked for yet.

        Args:
            plan: what a rollout is.
            slots: who is there.
            scheduler: decides; it is told of what it has to know for that.
            versions: which weights were sent to whom.
            max_lag: what lags more is given up; None: nothing is for that.
            drained: called with worker_id and incarnation, once a worker that is to leave owes
                nothing any more.
        """
        self.arrived: list[RolloutRequest] = []
        self.stale_frames: dict[int, int] = {}
        self._plan = plan
        self._slots = slots
        self._scheduler = scheduler
        self._versions = versions
        self._max_lag = max_lag
        self._drained = drained
        self._ledger = Ledger()
        self._paces: dict[int, WorkerThroughput] = {}
        self._unaccounted: dict[tuple[int, int], int] = {}  # frames asked of a process that is gone
        self._epoch = 0  # how often all that was asked for was given up
        self._kept: dict[
            RolloutRequest, str
        ] = {}  # those that others may still take, and their keys

    @property
    def ledger(self) -> LedgerReport:
        """Where all frames went."""
        return self._ledger.report()

    @property
    def paces(self) -> dict[int, WorkerThroughput]:
        """worker_id to how fast it is."""
        return dict(sorted(self._paces.items()))

    @property
    def num_ready(self) -> dict[int, int]:
        """worker_id to how many of its rollouts lie ready, there or here; none if it has none."""
        return dict(Counter(request.ticket.worker_id for request in self.arrived))

    @property
    def here(self) -> list[RolloutRequest]:
        """Those of the arrived that are here."""
        return [request for request in self.arrived if request.rollout is not None]

    @property
    def kept(self) -> dict[RolloutRequest, str]:
        """Those that lie on their workers for other trainers to take, and their keys."""
        return dict(self._kept)

    # Decisions.

    def next_slots(self) -> Iterator[WorkerSlot]:
        """Those to be asked now, each in view of what came of asking the one before."""
        return self._scheduler.next_slots(self.arrived)

    @property
    def may_end_early(self) -> bool:
        """Whether a batch has enough, so that what is still collected for it may be less."""
        return self._scheduler.may_end_early(len(self.arrived))

    def end_early(self) -> None:
        """A batch goes without what isn't collected yet."""
        self._scheduler.ends_early = True

    def to_preempt(self) -> list[RolloutRequest]:
        """Those that are still collected for a batch that ends early, and weren't told so."""
        if not self._scheduler.ends_early:
            return []
        return [
            request
            for slot in self._slots
            for request in slot.open
            if request.offer is None and not request.preempted and self._is_current(request)
        ]

    def next_delivery(self) -> RolloutRequest | None:
        """What the user gets next, here or not yet; None if that is still to come."""
        return self._scheduler.choose(self.arrived)

    def to_hand_over(self) -> RolloutRequest | None:
        """What another trainer gets next, if anything lies ready; here only if nothing else is."""
        lie_there = [request for request in self.arrived if request.lies_there]
        if lie_there:
            return self._scheduler.choose_to_give(lie_there)
        here = self.here
        if here and not any(slot.collecting for slot in self._slots.collecting()):
            return self._scheduler.choose_to_give(here)
        return None

    # From the request to the rollout.

    def ask(self, slot: WorkerSlot, now: int) -> tuple[RolloutRequest, CollectRequest]:
        """A worker is asked for its next rollout, at this time in nanoseconds."""
        random = self._scheduler.frames_asked < self._plan.random_frames
        slot.collecting = True
        number, slot.num_requests = slot.num_requests, slot.num_requests + 1
        request = RolloutRequest(slot, self._scheduler.request(slot), number, self._epoch, now)
        slot.unsettled.add(number)
        slot.open.add(request)
        return request, CollectRequest(
            self._plan.num_steps,
            random=random,
            fresh=self._plan.sync,
            version=request.ticket.version,
        )

    def _is_current(self, request: RolloutRequest) -> bool:
        """Whether it was asked for since all was given up last."""
        return request.epoch == self._epoch

    def offered(self, request: RolloutRequest, offer: Offer, now: int) -> bool:
        """It lies ready on its worker; whether it has arrived, and not been given up before."""
        slot, header = request.slot, offer.header
        slot.collecting = False
        if slot.gone:
            offer.decline()  # it was given up when its worker was lost
            return False
        self._ledger.announce(
            slot.worker_id,
            slot.incarnation,
            header.sequence,
            header.num_frames,
            stepped=header.stepped,
            lost=header.lost,
        )
        request.offer = offer
        pace = self._paces.get(slot.worker_id, WorkerThroughput())
        took_s = (now - request.asked_at) / 1e9
        self._paces[slot.worker_id] = pace.after(took_s, preempted=request.preempted)
        lowest, _ = header.policy_version
        self._scheduler.arrived(request.ticket, lowest)
        if not self._is_current(request):
            self._give_up(request, "given_up")
            return False
        self.arrived.append(request)
        return True

    def fetched(self, request: RolloutRequest, tensors: Tensors) -> None:
        """It is here."""
        request.fetching = False
        if self._is_current(request):
            assert request.offer is not None
            request.slot.settle(request)
            request.rollout = Rollout(request.offer.header, tensors)
            self.check_drained(request.slot)
        else:
            self._give_up(request, "given_up")

    def not_fetched(self, request: RolloutRequest) -> None:
        """It can't be had; it is given up with its worker."""
        request.fetching, request.failed = False, True
        if request.slot.gone:
            self._discard(request)
            self._give_up(request, "worker_lost")

    # Its end.

    def deliver(self, request: RolloutRequest) -> Rollout:
        """The user gets it."""
        self.arrived.remove(request)
        return self._deliver(request)

    def deliver_all(self) -> list[Rollout]:
        """The user gets all that are here, which are all that arrived."""
        rollouts = [self._deliver(request) for request in self.here]
        self.arrived.clear()
        return rollouts

    def _deliver(self, request: RolloutRequest) -> Rollout:
        assert request.rollout is not None
        self._ledger.deliver(*origin(request.rollout.header))
        return request.rollout

    def keep(self, request: RolloutRequest, key: str) -> None:
        """Its worker is to keep it for whichever trainer shows this key."""
        assert request.offer is not None
        self._kept[request] = key
        self.arrived.remove(request)
        request.fetching = True
        request.offer.decline()

    def keep_no_longer(self, request: RolloutRequest, cause: str | None) -> None:
        """Another trainer has it, or it is lost for ``cause``."""
        assert request.offer is not None
        del self._kept[request]
        request.fetching, request.failed = False, not request.referred
        if cause != "worker_lost":  # else its memory is of no use any more
            request.slot.unsettled.discard(request.number)
        request.slot.open.discard(request)
        if cause is None:
            self._ledger.deliver(*origin(request.offer.header))
        else:
            self._ledger.lose(*origin(request.offer.header), cause)
        if not request.referred:
            self._scheduler.given_up(request, is_wanted=True)
        self.check_drained(request.slot)

    def give_up_stale(self) -> bool:
        """Settle those that are too stale to be handed on; whether there were any."""
        if self._max_lag is None:
            return False
        stale = [
            request
            for request in self.arrived
            if not request.fetching
            and self._versions.lag(request.ticket.worker_id, request.ticket.version) > self._max_lag
        ]
        if not stale:
            return False
        self.arrived[:] = [request for request in self.arrived if request not in stale]
        for request in stale:
            assert request.offer is not None
            self.stale_frames[request.ticket.worker_id] += request.offer.header.num_frames
            self._give_up(request, "stale")
        return True

    def give_up_all(self) -> None:
        """Take no rollout that was asked for until now."""
        self._epoch += 1
        self._scheduler.given_up_all()
        for request in list(self.arrived):
            self.arrived.remove(request)
            # One that is being fetched is settled when it arrives.
            if not request.fetching:
                self._give_up(request, "given_up")

    def _give_up(self, request: RolloutRequest, cause: str) -> None:
        request.slot.settle(request)
        if request.offer is not None:
            self._ledger.lose(*origin(request.offer.header), cause)
            if request.rollout is None:
                request.offer.decline()
        self._scheduler.given_up(request, is_wanted=self._is_current(request))
        self.check_drained(request.slot)

    def _discard(self, request: RolloutRequest) -> None:
        if request in self.arrived:
            self.arrived.remove(request)

    # The end of who was asked.

    def check_drained(self, slot: WorkerSlot) -> None:
        """Say so, once, if a worker that is to leave owes nothing any more."""
        owes = slot.collecting or slot.unsettled
        if slot.leaving and not (slot.gone or slot.drained or owes):
            slot.drained = True
            self._drained(slot.worker_id, slot.incarnation)

    def vacate(self, slot: WorkerSlot) -> None:
        """A worker is gone, and with it what isn't here or on its way here."""
        self._note_unknown(slot)
        for request in [request for request in slot.open if not request.fetching]:
            self._discard(request)
            self._give_up(request, "worker_lost")

    def _note_unknown(self, slot: WorkerSlot) -> None:
        """So many frames a worker may have stepped that nobody will hear of."""
        unknown = sum(request.offer is None for request in slot.open)
        self._unaccounted[slot.worker_id, slot.incarnation] = unknown * self._plan.rollout_frames

    def account(self, worker_id: int, incarnation: int, cause: str, stepped: int | None) -> None:
        """Settle the frames of a process that is gone."""
        at_most = self._unaccounted.pop((worker_id, incarnation), 0)
        self._ledger.end(worker_id, incarnation, cause, stepped=stepped, at_most=at_most)

    def close(self) -> None:
        """Nothing more is delivered, and nobody heard."""
        # Those that are on their way here as well, though nobody may want them any more.
        self._ledger.lose_waiting("shut_down")
        for slot in self._slots:
            self._note_unknown(slot)
        self.arrived.clear()


def origin(header: Header) -> tuple[int, int, int]:
    """Which rollout of the run this is: worker_id, incarnation, sequence."""
    return header.worker_id, header.incarnation, header.sequence
