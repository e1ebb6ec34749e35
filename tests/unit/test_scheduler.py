"""Which workers get requests, and which rollout is next; no threads, clocks or workers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distcollect.config import Staleness
from distcollect.pool.modes import make_scheduler
from distcollect.pool.pool_commands import Command, Decline, ReportDrained
from distcollect.pool.requests import Requests
from distcollect.pool.staleness import SentVersions
from distcollect.pool.worker_slots import (
    BatchPlan,
    RolloutRequest,
    RolloutState,
    SlotState,
    WorkerSlot,
    WorkerSlots,
)
from distcollect.rollout.header import Header
from distcollect.transport.protocol import NUM_SLABS

FRAMES = 4
SYNC = BatchPlan(sync=True, num_rollouts=2, num_envs=1, num_steps=FRAMES)
AHEAD = replace(SYNC, sync=False, num_rollouts=1)
IN_TURN = replace(AHEAD, in_turn=True)


class Offer:
    """A rollout that is ready on its worker."""

    def __init__(self, request: RolloutRequest, version: int) -> None:
        key = (request.slot.worker_id, request.slot.incarnation, request.number)
        stepped = (request.number + 1) * FRAMES
        self.header = Header(*key, FRAMES, FRAMES, 0, (version, version), stepped=stepped)
        self.declined = False

    def decline(self) -> None:
        self.declined = True


class Play:
    """Requests and workers without any automatic events."""

    def __init__(
        self, plan: BatchPlan, num_workers: int, *, staleness: Staleness | None = None
    ) -> None:
        self.versions = SentVersions()
        self.slots = WorkerSlots(self.versions, plan.reserved)
        self.scheduler = make_scheduler(plan, staleness, self.slots, self.versions)
        self.drained: list[tuple[int, int]] = []
        self.requests = Requests(
            plan,
            self.slots,
            self.scheduler,
            self.versions,
            self.execute,
            max_lag=staleness.max_policy_lag if staleness else None,
        )
        self.open: list[RolloutRequest] = []
        for worker_id in range(num_workers):
            self.join(worker_id, 0, worker_id)

    def execute(self, command: Command) -> None:
        if isinstance(command, Decline):
            command.offer.decline()
        elif isinstance(command, ReportDrained):
            self.drained.append((command.slot.worker_id, command.slot.incarnation))

    def join(self, worker_id: int, incarnation: int, peer: int) -> None:
        slot = self.slots.add(worker_id, incarnation, peer, 0)
        self.requests.stale_frames.setdefault(worker_id, 0)
        slot.become(SlotState.SERVING)
        self.scheduler.joined(slot)

    def slot(self, worker_id: int) -> WorkerSlot:
        slot = self.slots.get(worker_id)
        assert slot is not None
        return slot

    def publish(self, version: int, worker_ids: list[int]) -> None:
        self.versions.publish(version, worker_ids)
        self.scheduler.published()
        for worker_id in worker_ids:
            self.slots.compare_versions(self.slot(worker_id))
            self.scheduler.refresh(self.slot(worker_id))

    def acknowledge(self, worker_id: int, version: int) -> None:
        self.slots.acknowledge(self.slot(worker_id), version)
        self.scheduler.refresh(self.slot(worker_id))

    def ask(self) -> list[int]:
        """Ask all that can be asked; who that is."""
        asked = []
        while (slot := self.scheduler.next_slot()) is not None:
            self.open.append(self.requests.request(slot))
            asked.append(slot.worker_id)
        return asked

    def come(self, worker_id: int, version: int = 0) -> RolloutRequest:
        """Finish a worker's oldest rollout, and fetch it at once."""
        request = next(request for request in self.open if request.slot.worker_id == worker_id)
        self.open.remove(request)
        if self.requests.offered(request, Offer(request, version), 1):  # type: ignore[arg-type]
            self.fetch(request)
        return request

    def fetch(self, request: RolloutRequest) -> None:
        self.requests.fetch(request)
        self.requests.fetched(request, [])

    def lose(self, worker_id: int, *, replaced: bool) -> None:
        self.open = [request for request in self.open if request.slot.worker_id != worker_id]
        slot = self.slots.remove(worker_id, 0, replaced=replaced)
        assert slot is not None
        self.requests.vacate(slot)
        self.scheduler.leaves(slot)

    def hand_on(self) -> int | None:
        """Whose rollout the user gets, if there is one for it."""
        chosen = self.scheduler.choose()
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
    play.join(1, 1, 2)
    assert play.ask() == [1]


def test_where_a_batch_needs_fewer_workers_than_there_are_each_gets_its_turn() -> None:
    """Also one that always gets new weights last."""
    play = Play(replace(SYNC, num_rollouts=1), 3)
    asked = []
    for version in range(1, 10):
        play.scheduler.begin()
        asked += play.ask()
        play.come(asked[-1], version - 1)
        play.requests.deliver_all()
        play.publish(version, [0, 1, 2])
        for worker_id in (0, 2, 1):
            play.acknowledge(worker_id, version)
    assert asked == [0, 1, 2] * 3


def test_what_is_collected_ahead_is_bounded_by_slabs_and_by_the_total() -> None:
    num_rollouts = 5
    play = Play(replace(AHEAD, num_frames=num_rollouts * FRAMES), 3)
    assert play.ask() == [], "the user may set a seed before the first batch"
    play.scheduler.begin()
    assert play.ask() == [0, 1, 2]
    play.scheduler.begin()
    unread = play.open[0]
    assert play.requests.offered(unread, Offer(unread, 0), 1)  # type: ignore[arg-type]
    play.open.remove(unread)
    assert play.ask() == [0], "it has a second slab"
    request = play.open[-1]
    assert play.requests.offered(request, Offer(request, 0), 1)  # type: ignore[arg-type]
    play.open.remove(request)
    assert play.slot(0).num_requests == NUM_SLABS
    assert play.ask() == [], "both slabs are to be read yet"
    play.fetch(unread)
    assert play.ask() == [0]
    play.come(1)
    play.come(2)
    assert play.ask() == [], "all frames are asked for"
    assert [play.hand_on() for _ in range(4)] == [0, 1, 2, None], "none before an older one"


@pytest.mark.parametrize("staleness", [None, Staleness(100)], ids=["any", "bounded"])
@pytest.mark.parametrize(("num_workers", "most"), [(1, 2), (2, 4), (3, 5), (50, 52)])
def test_workers_run_no_further_ahead_than_keeps_the_trainer_fed(
    num_workers: int, most: int, staleness: Staleness | None
) -> None:
    """A slow trainer: all that may be collected has arrived before it takes the next batch."""
    play = Play(AHEAD, num_workers, staleness=staleness)
    for ahead in (num_workers, most):  # fewer before the second batch: weights may come with it
        play.scheduler.begin()
        while play.ask():
            for request in list(play.open):
                play.come(request.slot.worker_id)
        assert len(play.requests.arrived) == ahead
    for _ in range(3):
        assert play.hand_on() is not None
        play.scheduler.begin()
        assert len(play.ask()) == 1
        play.come(play.open[0].slot.worker_id)
    play.lose(0, replaced=True)  # what it has delivered stays; its share does not
    assert play.ask() == []


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
    play.publish(1, [0])
    play.scheduler.begin()
    assert play.ask() == [], "it has to have its weights before"
    assert play.hand_on() is None, "or it would be asked before the next, or not, as it happens"
    play.acknowledge(0, 1)
    assert play.ask() == [0]
    assert [play.hand_on(), play.hand_on(), play.hand_on()] == [1, 2, None]


def test_in_turn_hands_on_what_is_left_of_who_is_gone() -> None:
    play = Play(IN_TURN, 2)
    play.scheduler.begin()
    play.ask()
    play.come(1)
    play.lose(1, replaced=True)
    play.join(1, 1, 2)
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
    play.join(0, 1, 3)
    assert play.ask() == [], "all frames are asked for"
    assert [play.hand_on(), play.hand_on()] == [2, 1]


def test_what_got_too_stale_is_given_up_and_in_sync_mode_asked_for_again() -> None:
    play = Play(SYNC, 2, staleness=Staleness(0, mode="drop"))
    play.scheduler.begin()
    play.ask()
    request = play.open.pop(0)
    offer = Offer(request, 0)
    assert play.requests.offered(request, offer, 1)  # type: ignore[arg-type]
    play.publish(1, [0])
    assert play.requests.give_up_stale()
    assert not play.requests.give_up_stale()
    assert offer.declined
    assert play.requests.stale_frames == {0: FRAMES, 1: 0}
    assert play.requests.ledger.total.lost == {"stale": FRAMES}
    assert play.ask() == [], "with which weights?"
    play.acknowledge(0, 1)
    assert play.ask() == [0]


def test_who_leaves_is_drained_once_it_owes_nothing() -> None:
    play = Play(AHEAD, 1)
    play.scheduler.begin()
    play.ask()
    slot = play.slot(0)
    slot.become(SlotState.LEAVING)
    play.scheduler.leaves(slot)
    play.requests.check_drained(slot)
    assert not play.drained
    play.come(0)
    assert play.ask() == []
    assert play.drained == [(0, 0)]
    play.requests.check_drained(slot)
    assert play.drained == [(0, 0)]


def test_a_state_that_does_not_follow_is_refused() -> None:
    play = Play(AHEAD, 1)
    play.scheduler.begin()
    play.ask()
    request = play.come(0)
    assert request.state is RolloutState.HERE
    with pytest.raises(RuntimeError, match=r"rollout 0 of worker 0.*it is here and can't become"):
        request.become(RolloutState.FETCHING)
    play.lose(0, replaced=False)
    with pytest.raises(RuntimeError, match=r"worker 0.*it is gone and can't become serving"):
        request.slot.become(SlotState.SERVING)
