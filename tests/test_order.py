"""Whom the pool would ask, and what it would hand on: without threads, clocks and workers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from distcollect.config import Staleness
from distcollect.rollout.header import Header
from distcollect.trainer.request_policy import order_for
from distcollect.trainer.requests import Requests
from distcollect.trainer.staleness import SentVersions
from distcollect.trainer.worker_slots import Asked, BatchPlan, Seat, Seats
from distcollect.transport.protocol import NUM_SLABS

FRAMES = 4
SYNC = BatchPlan(sync=True, num_rollouts=2, num_envs=1, num_steps=FRAMES)
AHEAD = replace(SYNC, sync=False, num_rollouts=1)
IN_TURN = replace(AHEAD, in_turn=True)


class Offer:
    """A rollout that lies ready on its worker."""

    def __init__(self, asked: Asked, version: int) -> None:
        key = (asked.seat.worker_id, asked.seat.incarnation, asked.number)
        stepped = (asked.number + 1) * FRAMES
        self.header = Header(*key, FRAMES, FRAMES, 0, (version, version), stepped=stepped)
        self.declined = False

    def decline(self) -> None:
        self.declined = True


class Play:
    """Requests and workers, of which nothing happens by itself."""

    def __init__(
        self, plan: BatchPlan, num_workers: int, *, staleness: Staleness | None = None
    ) -> None:
        self.has: Counter[int] = Counter()
        self.versions = SentVersions()
        self.seats = Seats(plan.set_aside)
        self.order = order_for(
            plan, staleness, self.seats, self.versions, lambda worker_id: self.has[worker_id]
        )
        self.drained: list[tuple[int, int]] = []
        self.requests = Requests(
            plan,
            self.seats,
            self.order,
            self.versions,
            max_lag=staleness.max_policy_lag if staleness else None,
            drained=lambda *key: self.drained.append(key),
        )
        self.open: list[Asked] = []
        for worker_id in range(num_workers):
            self.seats.take(worker_id, 0, worker_id)
            self.requests.stale_frames[worker_id] = 0

    def seat(self, worker_id: int) -> Seat:
        seat = self.seats.get(worker_id)
        assert seat is not None
        return seat

    def ask(self) -> list[int]:
        """Ask all that can be asked; who that is."""
        asked = [self.requests.ask(seat, 0)[0] for seat in self.requests.whom()]
        self.open += asked
        return [one.seat.worker_id for one in asked]

    def come(self, worker_id: int, version: int = 0) -> Asked:
        """A worker's oldest rollout is done, and comes here at once."""
        asked = next(asked for asked in self.open if asked.seat.worker_id == worker_id)
        self.open.remove(asked)
        if self.requests.offered(asked, Offer(asked, version), 1):  # type: ignore[arg-type]
            self.requests.fetched(asked, [])
        return asked

    def lose(self, worker_id: int, *, replaced: bool) -> None:
        self.open = [asked for asked in self.open if asked.seat.worker_id != worker_id]
        seat = self.seats.vacate(worker_id, 0, replaced=replaced)
        assert seat is not None
        self.requests.vacate(seat)

    def hand_on(self) -> int | None:
        """Whose rollout the user gets, if there is one for it."""
        chosen = self.requests.to_hand_on()
        if chosen is None:
            return None
        self.requests.deliver(chosen)
        self.order.delivered(chosen)
        return chosen.seat.worker_id


def test_a_batch_of_many_workers_is_asked_for_once_and_lost_shares_of_as_many_others() -> None:
    num_workers, num_lost = 2000, 700
    play = Play(replace(SYNC, num_rollouts=num_workers), num_workers)
    assert play.ask() == [], "no batch is wanted yet"
    play.order.begin()
    assert play.ask() == list(range(num_workers))
    assert play.ask() == []
    for worker_id in range(num_lost):
        play.lose(worker_id, replaced=False)
    assert play.ask() == [], "all others are at work"
    for worker_id in range(num_lost, num_workers):
        play.come(worker_id)
    assert sorted(play.ask()) == list(range(num_lost, 2 * num_lost))
    for worker_id in range(num_lost, 2 * num_lost):
        play.come(worker_id)
    assert play.ask() == []
    assert len(play.requests.deliver_all()) == num_workers
    assert play.order.frames_asked == play.requests.ledger.total.delivered == num_workers * FRAMES


def test_the_share_of_who_is_replaced_waits_where_that_is_wanted() -> None:
    play = Play(replace(SYNC, waits_for_missing=True), 2)
    play.order.begin()
    play.ask()
    play.come(0)
    play.lose(1, replaced=True)
    assert play.ask() == []
    play.seats.take(1, 1, 2)
    assert play.ask() == [1]


def test_what_is_collected_ahead_is_bounded_by_slabs_and_by_the_total() -> None:
    num_rollouts = 5
    play = Play(replace(AHEAD, num_frames=num_rollouts * FRAMES), 2)
    assert play.ask() == [0, 1]
    unread = play.open[0]
    assert play.requests.offered(unread, Offer(unread, 0), 1)  # type: ignore[arg-type]
    play.open.remove(unread)
    play.come(1)
    assert play.ask() == [0, 1], "each has a second slab"
    asked = play.open[0]
    assert play.requests.offered(asked, Offer(asked, 0), 1)  # type: ignore[arg-type]
    assert play.seat(0).num_requests == NUM_SLABS
    assert play.ask() == [], "both slabs are to be read yet"
    play.requests.fetched(unread, [])
    assert play.ask() == [0]
    play.come(1)
    assert play.ask() == [], "all frames are asked for"
    assert [play.hand_on() for _ in range(4)] == [0, 1, 1, None], "none before an older one"


def test_in_turn_is_in_turn_whoever_comes_first() -> None:
    play = Play(IN_TURN, 3)
    assert play.ask() == [], "more weights may come before the user wants a batch"
    play.order.begin()
    assert play.ask() == [0, 1, 2]
    for worker_id in (2, 1):
        play.come(worker_id)
    assert play.hand_on() is None
    play.come(0)
    assert play.hand_on() == 0
    play.order.end()
    play.versions.publish(1, [0])
    play.order.begin()
    assert play.ask() == [], "it has to have its weights before"
    assert play.hand_on() is None, "or it would be asked before the next, or not, as it happens"
    play.has[0] = 1
    assert play.ask() == [0]
    assert [play.hand_on(), play.hand_on(), play.hand_on()] == [1, 2, None]


def test_in_turn_hands_on_what_is_left_of_who_is_gone() -> None:
    play = Play(IN_TURN, 2)
    play.order.begin()
    play.ask()
    play.come(1)
    play.lose(1, replaced=True)
    play.seats.take(1, 1, 2)
    assert play.hand_on() == 1


def test_in_turn_nobody_waits_for_who_is_asked_for_nothing_more() -> None:
    play = Play(replace(IN_TURN, num_frames=3 * FRAMES), 3)
    play.order.begin()
    assert play.ask() == [0, 1, 2]
    play.come(2)
    play.lose(0, replaced=True)
    play.come(1)
    assert play.hand_on() == 1
    assert play.ask() == [1], "for what is missing"
    play.come(1)
    play.seats.take(0, 1, 3)
    assert play.ask() == [], "all frames are asked for"
    assert [play.hand_on(), play.hand_on()] == [2, 1]


def test_what_got_too_stale_is_given_up_and_in_sync_mode_asked_for_again() -> None:
    play = Play(SYNC, 2, staleness=Staleness(0, mode="drop"))
    play.order.begin()
    play.ask()
    asked = play.open.pop(0)
    offer = Offer(asked, 0)
    assert play.requests.offered(asked, offer, 1)  # type: ignore[arg-type]
    play.versions.publish(1, [0])
    assert play.requests.give_up_stale()
    assert not play.requests.give_up_stale()
    assert offer.declined
    assert play.requests.stale_frames == {0: FRAMES, 1: 0}
    assert play.requests.ledger.total.lost == {"stale": FRAMES}
    assert play.ask() == [], "with which weights?"
    play.has[0] = 1
    assert play.ask() == [0]


def test_who_leaves_is_drained_once_it_owes_nothing() -> None:
    play = Play(AHEAD, 1)
    play.ask()
    seat = play.seat(0)
    seat.leaving = True
    play.requests.check_drained(seat)
    assert not play.drained
    play.come(0)
    assert play.ask() == []
    assert play.drained == [(0, 0)]
    play.requests.check_drained(seat)
    assert play.drained == [(0, 0)]
