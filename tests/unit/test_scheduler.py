"""Which workers are asked, and which rollout is next; no threads, clocks or workers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.core_play import FRAMES, SYNC, Play

from distcollect.config import Staleness
from distcollect.pool.event_loop import EventLoop
from distcollect.transport.protocol import NUM_SLABS

AHEAD = replace(SYNC, sync=False, num_rollouts=1)
IN_TURN = replace(AHEAD, in_turn=True)


def test_all_is_decided_once_after_an_event_and_those_that_it_leads_to() -> None:
    seen: list[str] = []
    loop = EventLoop(pytest.fail, lambda: seen.append("decide"))
    loop.do(lambda: [loop.post(seen.append, "second"), seen.append("first")])
    assert seen == ["first", "second", "decide"]


def test_a_batch_of_many_workers_is_asked_for_once_and_lost_shares_of_as_many_others() -> None:
    num_workers, num_lost = 1000, 350
    play = Play(replace(SYNC, num_rollouts=num_workers), num_workers)
    assert play.take_asked() == [], "no batch is wanted yet"
    play.want()
    assert play.take_asked() == list(range(num_workers))
    for worker_id in range(num_lost):
        play.lose(worker_id, replaced=False)
    assert play.take_asked() == [], "all others are at work"
    for worker_id in range(num_lost, num_workers):
        play.come(worker_id)
    again = play.take_asked()
    assert len(set(again)) == len(again) == num_lost
    for worker_id in again:
        play.come(worker_id)
    assert play.take_asked() == []
    [batch] = play.delivered
    assert len(batch) == num_workers
    assert play.core.requests.frames_asked == num_workers * FRAMES


def test_the_share_of_who_is_replaced_waits_where_that_is_wanted() -> None:
    play = Play(replace(SYNC, waits_for_missing=True), 2)
    play.want()
    play.come(0)
    play.lose(1, replaced=True)
    assert play.take_asked() == [0, 1]
    play.join(1, 1)
    assert play.take_asked() == [1]


def test_of_rows_that_drift_apart_a_vanished_host_may_have_stepped_more() -> None:
    play = Play(replace(AHEAD, skew=2), 1)
    play.want()
    play.lose(0, replaced=False)
    play.core.requests.account(0, 0, "worker_lost", None)
    assert play.core.requests.ledger.report().total.at_most == 2 * FRAMES


@pytest.mark.parametrize("mode", ["pace", "drop"])
def test_who_has_weights_that_are_too_old_is_named_and_with_pace_not_asked(mode: str) -> None:
    """Those of worker 1, which was left out of every publication, have no lag."""
    paces = mode == "pace"
    play = Play(AHEAD, 2, staleness=Staleness(max_policy_age=2, mode=mode))
    for version in range(1, 41):
        play.publish(version, [0])
    play.acknowledge(0, 40)
    play.want()
    assert {*play.take_asked()} == ({0} if paces else {0, 1})
    play.lose(0, replaced=False)
    assert play.take_asked() == []
    assert play.core.awaited[0].startswith("newer weights for workers [1] (theirs are older than ")
    play.publish(41, [1])
    play.acknowledge(1, 41)
    assert play.take_asked() == ([1] if paces else [])
    assert play.core.awaited[0] == "workers [1]"


def test_a_worker_that_gets_no_weights_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    """All its rollouts are dropped. Worker 0 has rollouts dropped too, of other versions."""
    play = Play(AHEAD, 2, staleness=Staleness(max_policy_age=0, mode="drop"))
    for version in range(1, 30):
        play.publish(version, [0])
        play.acknowledge(0, version)
        play.want()
        play.come(1)
        play.come(0, version - 1)
        play.come(0, version)
    [record] = caplog.records
    assert record.getMessage().startswith(
        "10 rollouts in a row of worker 1 were dropped as too old: it still has version 0 of the"
    )


def test_a_worker_that_is_too_slow_for_the_bound_is_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each rollout of worker 1 begins with the newest weights, and takes it two versions."""
    play = Play(AHEAD, 2, staleness=Staleness(max_policy_lag=1, mode="drop"))
    version = 0
    for _ in range(30):
        play.want()
        begun_with = version
        for _ in range(2):
            version += 1
            play.publish(version, [0, 1])
            play.acknowledge(0, version)
            play.acknowledge(1, version)
            play.come(0, version)
            play.want()
        play.come(1, begun_with)
    assert {w: bool(n) for w, n in play.core.requests.stale_frames.items()} == {0: False, 1: True}
    [record] = caplog.records
    assert record.getMessage().startswith("10 rollouts in a row of worker 1 were dropped")
    assert "mode='pace'" in record.getMessage()


def test_a_worker_of_which_some_rollouts_are_dropped_is_not_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    play = Play(AHEAD, 1, staleness=Staleness(max_policy_lag=0, mode="drop"))
    for version in range(1, 60):
        play.want()
        play.publish(version, [0])
        play.acknowledge(0, version)
        play.come(0, version - 1 if version % 10 else version)
    assert play.core.requests.stale_frames[0] > 40 * FRAMES
    assert not caplog.records


def test_where_a_batch_needs_fewer_workers_than_there_are_each_gets_its_turn() -> None:
    """Also one that always gets new weights last."""
    play = Play(replace(SYNC, num_rollouts=1), 3)
    asked = []
    for version in range(1, 10):
        play.want()
        asked += play.take_asked()
        play.come(asked[-1], version - 1)
        play.publish(version, [0, 1, 2])
        for worker_id in (0, 2, 1):
            play.acknowledge(worker_id, version)
    assert [sorted(asked[i : i + 3]) for i in (0, 3, 6)] == [[0, 1, 2]] * 3


def test_what_is_collected_ahead_is_bounded_by_slabs_and_by_the_total() -> None:
    num_rollouts = 6
    play = Play(replace(AHEAD, num_frames=num_rollouts * FRAMES), 3)
    assert play.take_asked() == [], "the user may set a seed before the first batch"
    play.want()
    assert play.take_asked() == [0, 1, 2]
    play.come(1)
    assert play.take(play.delivered) == [[1]]
    play.finish(0)
    assert play.take_asked() == [1], "no more before the second batch is wanted"
    assert play.want() is None
    assert play.take_asked() == [0], "it has a second slab"
    play.finish(0)
    assert play.take_asked() == [], "both slabs are to be read yet"
    play.arrive()
    assert play.take(play.delivered) == [[0]]
    assert play.take_asked() == [0]
    assert len(play.open) + 3 == num_rollouts
    for worker_id in (0, 1, 2):
        play.come(worker_id)
    assert play.take_asked() == [], "all frames are asked for"
    assert NUM_SLABS == 2


@pytest.mark.parametrize("staleness", [None, Staleness(100)], ids=["any", "bounded"])
def test_a_worker_delivers_in_order(staleness: Staleness | None) -> None:
    play = Play(AHEAD, 2, staleness=staleness)
    play.want()
    play.want()
    play.come(1)
    assert play.take(play.delivered) == [[1]]
    play.finish(0)
    play.finish(0)
    late, early = play.fetching
    early.arrive([], None)
    assert play.want() is None, "none before an older one of the same worker"
    late.arrive([], None)
    assert play.take(play.delivered) == [[0]]
    assert play.want() == [0]


@pytest.mark.parametrize("staleness", [None, Staleness(100)], ids=["any", "bounded"])
@pytest.mark.parametrize(("num_workers", "most"), [(1, 2), (2, 4), (3, 5), (50, 52)])
def test_workers_run_no_further_ahead_than_keeps_the_trainer_fed(
    num_workers: int, most: int, staleness: Staleness | None
) -> None:
    """A slow trainer: all that may be collected has arrived before it takes the next batch."""
    play = Play(AHEAD, num_workers, staleness=staleness)

    def collect_all() -> int:
        while play.open:
            play.come(play.open[0].worker_id)
        return play.core.requests.num_waiting

    play.want()
    assert collect_all() == num_workers, "fewer before the second batch: weights may come with it"
    for _ in range(3):
        assert play.want() is not None
        assert collect_all() == most
    play.lose(0, replaced=True)  # what it has delivered stays; its share does not
    assert collect_all() <= most


def test_in_turn_is_in_turn_whoever_comes_first() -> None:
    play = Play(IN_TURN, 3)
    assert play.take_asked() == [], "more weights may come before the user wants a batch"
    play.want()
    assert play.take_asked() == [0, 1, 2]
    for worker_id in (2, 1):
        play.come(worker_id)
    assert play.delivered == []
    play.come(0)
    assert play.take(play.delivered) == [[0]]
    play.publish(1, [0])
    assert play.want() is None, "or it would be asked before the next, or not, as it happens"
    assert play.take_asked() == [], "it has to have its weights before"
    play.acknowledge(0, 1)
    assert play.take_asked() == [0]
    assert play.take(play.delivered) == [[1]]
    assert play.want() == [2]
    assert play.want() is None


def test_in_turn_hands_on_what_is_left_of_who_is_gone() -> None:
    play = Play(IN_TURN, 2)
    play.want()
    play.come(1)
    play.lose(1, replaced=True)
    assert play.take(play.delivered) == [[1]]
    play.join(1, 1)
    play.want()
    assert play.take_asked() == [0, 1, 1]


def test_in_turn_nobody_waits_for_who_is_asked_for_nothing_more() -> None:
    play = Play(replace(IN_TURN, num_frames=3 * FRAMES), 3)
    play.want()
    assert play.take_asked() == [0, 1, 2]
    play.come(2)
    play.lose(0, replaced=True)
    play.come(1)
    assert play.take(play.delivered) == [[1]]
    assert play.want() == [2]
    assert play.take_asked() == [1], "for what is missing"
    play.come(1)
    play.join(0, 1)
    assert play.want() == [1]
    assert play.take_asked() == [], "all frames are asked for"


def test_the_order_in_which_workers_join_makes_no_difference() -> None:
    """The first frames of a run may have random actions: which ones does not depend on chance."""
    play = Play(SYNC, 0)
    play.join(1)
    play.join(0)
    play.want()
    assert play.take_asked() == [0, 1]
