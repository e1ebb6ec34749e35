"""Whom the pool would ask, and what it would hand on: without threads, clocks and workers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from distcollect.config import Staleness
from distcollect.rollout.header import Header
from distcollect.trainer.requests import Requests
from distcollect.trainer.scheduler import make_scheduler
from distcollect.trainer.staleness import SentVersions
from distcollect.trainer.worker_slots import BatchPlan, RolloutRequest, WorkerSlot, WorkerSlots
from distcollect.transport.protocol import NUM_SLABS

FRAMES = 4
SYNC = BatchPlan(sync=True, num_rollouts=2, num_envs=1, num_steps=FRAMES)
AHEAD = replace(SYNC, sync=False, num_rollouts=1)
IN_TURN = replace(AHEAD, in_turn=True)


class Offer:
    """A rollout that lies ready on its worker."""

    def __init__(self, request: RolloutRequest, version: int) -> None:
        key = (request.slot.worker_id, request.slot.incarnation, request.number)
        stepped = (request.number + 1) * FRAMES
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
        self.slots = WorkerSlots(plan.reserved)
        self.scheduler = make_scheduler(
            plan, staleness, self.slots, self.versions, lambda worker_id: self.has[worker_id]
        )
        self.drained: list[tuple[int, int]] = []
        self.requests = Requests(
            plan,
            self.slots,
            self.scheduler,
            self.versions,
            max_lag=staleness.max_policy_lag if staleness else None,
            drained=lambda *key: self.drained.append(key),
        )
        self.open: list[RolloutRequest] = []
        for worker_id in range(num_workers):
            self.slots.take(worker_id, 0, worker_id)
            self.requests.stale_frames[worker_id] = 0

    def slot(self, worker_id: int) -> WorkerSlot:
        slot = self.slots.get(worker_id)
        assert slot is not None
        return slot

    def ask(self) -> list[int]:
        """Ask all that can be asked; who that is."""
        request = [self.requests.ask(slot, 0)[0] for slot in self.requests.next_slots()]
        self.open += request
        return [one.slot.worker_id for one in request]

    def come(self, worker_id: int, version: int = 0) -> RolloutRequest:
        """A worker's oldest rollout is done, and comes here at once."""
        request = next(request for request in self.open if request.slot.worker_id == worker_id)
        self.open.remove(request)
        if self.requests.offered(request, Offer(request, version), 1):  # type: ignore[arg-type]
            self.requests.fetched(request, [])
        return request

    def lose(self, worker_id: int, *, replaced: bool) -> None:
        self.open = [request for request in self.open if request.slot.worker_id != worker_id]
        slot = self.slots.vacate(worker_id, 0, replaced=replaced)
        assert slot is not None
        self.requests.vacate(slot)

    def hand_on(self) -> int | None:
        """Whose rollout the user gets, if there is one for it."""
        chosen = self.requests.next_delivery()
        if chosen is None:
            return None
        self.requests.deliver(chosen)
        self.scheduler.delivered(chosen)
        return chosen.slot.worker_id


def test_a_batch_of_many_workers_is_asked_for_once_and_lost_shares_of_as_many_others() -> None:
    num_workers, num_lost = 2000, 700
    play = Play(replace(SYNC, num_rollouts=num_workers), num_workers)
    assert play.ask() == [], "no batch is wanted yet"
    play.scheduler.begin()
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
    assert (
        play.scheduler.frames_asked == play.requests.ledger.total.delivered == num_workers * FRAMES
    )


def test_the_share_of_who_is_replaced_waits_where_that_is_wanted() -> None:
    play = Play(replace(SYNC, waits_for_missing=True), 2)
    play.scheduler.begin()
    play.ask()
    play.come(0)
    play.lose(1, replaced=True)
    assert play.ask() == []
    play.slots.take(1, 1, 2)
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
    request = play.open[0]
    assert play.requests.offered(request, Offer(request, 0), 1)  # type: ignore[arg-type]
    assert play.slot(0).num_requests == NUM_SLABS
    assert play.ask() == [], "both slabs are to be read yet"
    play.requests.fetched(unread, [])
    assert play.ask() == [0]
    play.come(1)
    assert play.ask() == [], "all frames are asked for"
    assert [play.hand_on() for _ in range(4)] == [0, 1, 1, None], "none before an older one"


def test_in_turn_is_in_turn_whoever_comes_first() -> None:
    play = Play(IN_TURN, 3)
    assert play.ask() == [], "more weights may come before the user wants a batch"
    play.scheduler.begin()
    assert play.ask() == [0, 1, 2]
    for worker_id in (2, 1):
        play.come(worker_id)
    assert play.hand_on() is None
    play.come(0)
    assert play.hand_on() == 0
    play.scheduler.end()
    play.versions.publish(1, [0])
    play.scheduler.begin()
    assert play.ask() == [], "it has to have its weights before"
    assert play.hand_on() is None, "or it would be asked before the next, or not, as it happens"
    play.has[0] = 1
    assert play.ask() == [0]
    assert [play.hand_on(), play.hand_on(), play.hand_on()] == [1, 2, None]


def test_in_turn_hands_on_what_is_left_of_who_is_gone() -> None:
    play = Play(IN_TURN, 2)
    play.scheduler.begin()
    play.ask()
    play.come(1)
    play.lose(1, replaced=True)
    play.slots.take(1, 1, 2)
    assert play.hand_on() == 1


def test_in_turn_nobody_waits_for_who_is_asked_for_nothing_more() -> None:
    play = Play(replace(IN_TURN, num_frames=3 * FRAMES), 3)
    play.scheduler.begin()
    assert play.ask() == [0, 1, 2]
    play.come(2)
    play.lose(0, replaced=True)
    play.come(1)
    assert play.hand_on() == 1
    assert play.ask() == [1], "for what is missing"
    play.come(1)
    play.slots.take(0, 1, 3)
    assert play.ask() == [], "all frames are asked for"
    assert [play.hand_on(), play.hand_on()] == [2, 1]


def test_what_got_too_stale_is_given_up_and_in_sync_mode_asked_for_again() -> None:
    play = Play(SYNC, 2, staleness=Staleness(0, mode="drop"))
    play.scheduler.begin()
    play.ask()
    request = play.open.pop(0)
    offer = Offer(request, 0)
    assert play.requests.offered(request, offer, 1)  # type: ignore[arg-type]
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
    slot = play.slot(0)
    slot.leaving = True
    play.requests.check_drained(slot)
    assert not play.drained
    play.come(0)
    assert play.ask() == []
    assert play.drained == [(0, 0)]
    play.requests.check_drained(slot)
    assert play.drained == [(0, 0)]
