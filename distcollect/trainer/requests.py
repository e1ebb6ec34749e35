"""What workers were asked for, and what became of it: delivered, or given up and why.

Pure bookkeeping, with the ledger that comes of it: nothing here locks or moves a rollout; the
caller does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from distcollect.results import LedgerReport, Pace
from distcollect.rollout.header import Header, Rollout
from distcollect.rollout.layout import Tensors
from distcollect.trainer.ledger import Ledger
from distcollect.trainer.request_policy import Order
from distcollect.trainer.staleness import SentVersions
from distcollect.trainer.worker_slots import Asked, BatchPlan, Seat, Seats
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
        seats: Seats,
        order: Order,
        versions: SentVersions,
        *,
        max_lag: int | None,
        drained: Callable[[int, int], None],
    ) -> None:
        """Nothing was asked for yet.

        Args:
            plan: what a rollout is.
            seats: who is there.
            order: decides; it is told of what it has to know for that.
            versions: which weights were sent to whom.
            max_lag: what lags more is given up; None: nothing is for that.
            drained: called with worker_id and incarnation, once a worker that is to leave owes
                nothing any more.
        """
        self.arrived: list[Asked] = []
        self.stale_frames: dict[int, int] = {}
        self._plan = plan
        self._seats = seats
        self._order = order
        self._versions = versions
        self._max_lag = max_lag
        self._drained = drained
        self._ledger = Ledger()
        self._paces: dict[int, Pace] = {}
        self._unaccounted: dict[tuple[int, int], int] = {}  # frames asked of a process that is gone
        self._epoch = 0  # how often all that was asked for was given up
        self._kept: dict[Asked, str] = {}  # those that others may still take, and their keys

    @property
    def ledger(self) -> LedgerReport:
        """Where all frames went."""
        return self._ledger.report()

    @property
    def paces(self) -> dict[int, Pace]:
        """worker_id to how fast it is."""
        return dict(sorted(self._paces.items()))

    @property
    def num_ready(self) -> dict[int, int]:
        """worker_id to how many of its rollouts lie ready, there or here; none if it has none."""
        return dict(Counter(asked.ticket.worker_id for asked in self.arrived))

    @property
    def here(self) -> list[Asked]:
        """Those of the arrived that are here."""
        return [asked for asked in self.arrived if asked.rollout is not None]

    @property
    def kept(self) -> dict[Asked, str]:
        """Those that lie on their workers for other trainers to take, and their keys."""
        return dict(self._kept)

    # Decisions.

    def whom(self) -> Iterator[Seat]:
        """Those to be asked now, each in view of what came of asking the one before."""
        return self._order.whom(self.arrived)

    @property
    def may_end_early(self) -> bool:
        """Whether a batch has enough, so that what is still collected for it may be less."""
        return self._order.may_end_early(len(self.arrived))

    def end_early(self) -> None:
        """A batch goes without what isn't collected yet."""
        self._order.ends_early = True

    def to_preempt(self) -> list[Asked]:
        """Those that are still collected for a batch that ends early, and weren't told so."""
        if not self._order.ends_early:
            return []
        return [
            asked
            for seat in self._seats
            for asked in seat.open
            if asked.offer is None and not asked.preempted and self._is_current(asked)
        ]

    def to_hand_on(self) -> Asked | None:
        """What the user gets next, here or not yet; None if that is still to come."""
        return self._order.choose(self.arrived)

    def to_hand_over(self) -> Asked | None:
        """What another trainer gets next, if anything lies ready; here only if nothing else is."""
        lie_there = [asked for asked in self.arrived if asked.lies_there]
        if lie_there:
            return self._order.choose_to_give(lie_there)
        here = self.here
        if here and not any(seat.collecting for seat in self._seats.collecting()):
            return self._order.choose_to_give(here)
        return None

    # From the request to the rollout.

    def ask(self, seat: Seat, now: int) -> tuple[Asked, CollectRequest]:
        """A worker is asked for its next rollout, at this time in nanoseconds."""
        random = self._order.frames_asked < self._plan.random_frames
        seat.collecting = True
        number, seat.num_requests = seat.num_requests, seat.num_requests + 1
        asked = Asked(seat, self._order.asked(seat), number, self._epoch, now)
        seat.unsettled.add(number)
        seat.open.add(asked)
        return asked, CollectRequest(
            self._plan.num_steps,
            random=random,
            fresh=self._plan.sync,
            version=asked.ticket.version,
        )

    def _is_current(self, asked: Asked) -> bool:
        """Whether it was asked for since all was given up last."""
        return asked.epoch == self._epoch

    def offered(self, asked: Asked, offer: Offer, now: int) -> bool:
        """It lies ready on its worker; whether it has arrived, and not been given up before."""
        seat, header = asked.seat, offer.header
        seat.collecting = False
        if seat.gone:
            offer.decline()  # it was given up when its worker was lost
            return False
        self._ledger.announce(
            seat.worker_id,
            seat.incarnation,
            header.sequence,
            header.num_frames,
            stepped=header.stepped,
            lost=header.lost,
        )
        asked.offer = offer
        pace = self._paces.get(seat.worker_id, Pace())
        took_s = (now - asked.asked_at) / 1e9
        self._paces[seat.worker_id] = pace.after(took_s, preempted=asked.preempted)
        lowest, _ = header.policy_version
        self._order.arrived(asked.ticket, lowest)
        if not self._is_current(asked):
            self._give_up(asked, "given_up")
            return False
        self.arrived.append(asked)
        return True

    def fetched(self, asked: Asked, tensors: Tensors) -> None:
        """It is here."""
        asked.fetching = False
        if self._is_current(asked):
            assert asked.offer is not None
            asked.seat.settle(asked)
            asked.rollout = Rollout(asked.offer.header, tensors)
            self.check_drained(asked.seat)
        else:
            self._give_up(asked, "given_up")

    def not_fetched(self, asked: Asked) -> None:
        """It can't be had; it is given up with its worker."""
        asked.fetching, asked.failed = False, True
        if asked.seat.gone:
            self._discard(asked)
            self._give_up(asked, "worker_lost")

    # Its end.

    def deliver(self, asked: Asked) -> Rollout:
        """The user gets it."""
        self.arrived.remove(asked)
        return self._deliver(asked)

    def deliver_all(self) -> list[Rollout]:
        """The user gets all that are here, which are all that arrived."""
        rollouts = [self._deliver(asked) for asked in self.here]
        self.arrived.clear()
        return rollouts

    def _deliver(self, asked: Asked) -> Rollout:
        assert asked.rollout is not None
        self._ledger.deliver(*origin(asked.rollout.header))
        return asked.rollout

    def keep(self, asked: Asked, key: str) -> None:
        """Its worker is to keep it for whichever trainer shows this key."""
        assert asked.offer is not None
        self._kept[asked] = key
        self.arrived.remove(asked)
        asked.fetching = True
        asked.offer.decline()

    def keep_no_longer(self, asked: Asked, cause: str | None) -> None:
        """Another trainer has it, or it is lost for ``cause``."""
        assert asked.offer is not None
        del self._kept[asked]
        asked.fetching, asked.failed = False, not asked.referred
        if cause != "worker_lost":  # else its memory is of no use any more
            asked.seat.unsettled.discard(asked.number)
        asked.seat.open.discard(asked)
        if cause is None:
            self._ledger.deliver(*origin(asked.offer.header))
        else:
            self._ledger.lose(*origin(asked.offer.header), cause)
        if not asked.referred:
            self._order.given_up(asked, is_wanted=True)
        self.check_drained(asked.seat)

    def give_up_stale(self) -> bool:
        """Settle those that are too stale to be handed on; whether there were any."""
        if self._max_lag is None:
            return False
        stale = [
            asked
            for asked in self.arrived
            if not asked.fetching
            and self._versions.lag(asked.ticket.worker_id, asked.ticket.version) > self._max_lag
        ]
        if not stale:
            return False
        self.arrived[:] = [asked for asked in self.arrived if asked not in stale]
        for asked in stale:
            assert asked.offer is not None
            self.stale_frames[asked.ticket.worker_id] += asked.offer.header.num_frames
            self._give_up(asked, "stale")
        return True

    def give_up_all(self) -> None:
        """Take no rollout that was asked for until now."""
        self._epoch += 1
        self._order.given_up_all()
        for asked in list(self.arrived):
            self.arrived.remove(asked)
            # One that is being fetched is settled when it arrives.
            if not asked.fetching:
                self._give_up(asked, "given_up")

    def _give_up(self, asked: Asked, cause: str) -> None:
        asked.seat.settle(asked)
        if asked.offer is not None:
            self._ledger.lose(*origin(asked.offer.header), cause)
            if asked.rollout is None:
                asked.offer.decline()
        self._order.given_up(asked, is_wanted=self._is_current(asked))
        self.check_drained(asked.seat)

    def _discard(self, asked: Asked) -> None:
        if asked in self.arrived:
            self.arrived.remove(asked)

    # The end of who was asked.

    def check_drained(self, seat: Seat) -> None:
        """Say so, once, if a worker that is to leave owes nothing any more."""
        owes = seat.collecting or seat.unsettled
        if seat.leaving and not (seat.gone or seat.drained or owes):
            seat.drained = True
            self._drained(seat.worker_id, seat.incarnation)

    def vacate(self, seat: Seat) -> None:
        """A worker is gone, and with it what isn't here or on its way here."""
        self._note_unknown(seat)
        for asked in [asked for asked in seat.open if not asked.fetching]:
            self._discard(asked)
            self._give_up(asked, "worker_lost")

    def _note_unknown(self, seat: Seat) -> None:
        """So many frames a worker may have stepped that nobody will hear of."""
        unknown = sum(asked.offer is None for asked in seat.open)
        self._unaccounted[seat.worker_id, seat.incarnation] = unknown * self._plan.rollout_frames

    def account(self, worker_id: int, incarnation: int, cause: str, stepped: int | None) -> None:
        """Settle the frames of a process that is gone."""
        at_most = self._unaccounted.pop((worker_id, incarnation), 0)
        self._ledger.end(worker_id, incarnation, cause, stepped=stepped, at_most=at_most)

    def close(self) -> None:
        """Nothing more is delivered, and nobody heard."""
        # Those that are on their way here as well, though nobody may want them any more.
        self._ledger.lose_waiting("shut_down")
        for seat in self._seats:
            self._note_unknown(seat)
        self.arrived.clear()


def origin(header: Header) -> tuple[int, int, int]:
    """Which rollout of the run this is: worker_id, incarnation, sequence."""
    return header.worker_id, header.incarnation, header.sequence
