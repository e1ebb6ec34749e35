"""Setup calls: their order, and what a failure of one leaves behind."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.core_play import SYNC, Play

from distcollect.errors import WorkerError
from distcollect.pool.worker_slots import SlotState, WorkerSlot


def seed(*_: Any) -> None: ...


def resume(*_: Any) -> None: ...


def answer(play: Play, worker_id: int, error: Exception | None = None) -> None:
    reply = play.answers[worker_id]
    if error is None:
        reply.set_result(None)
    else:
        reply.set_exception(error)


def test_a_worker_gets_one_call_after_the_other_and_the_newest_of_each_method() -> None:
    """Calls may overtake each other on their way."""
    play = Play(SYNC, 2)
    calls = [
        play.core.setup_call_begun(method, lambda _, i=i: (i,))
        for i, method in enumerate([seed, resume, seed, seed])
    ]
    assert play.take(play.called) == [(0, "seed", 0), (1, "seed", 0)]
    assert [len(call.late) for call in calls] == [2, 2, 0, 2]
    play.want()
    for worker_id in (0, 1):
        for _ in range(3):
            assert worker_id not in play.asked
            answer(play, worker_id)
        left = 1 - worker_id
        assert [len(call.late) for call in calls] == [left, left, 0, left]
    assert play.asked == [0, 1]
    assert play.take(play.called)[-2:] == [(1, "resume", 1), (1, "seed", 3)]
    play.join(2)
    answer(play, 2)
    assert sorted(play.take(play.called)) == [(2, "resume", 1), (2, "seed", 3)]


def test_arguments_that_can_not_be_made_change_nothing() -> None:
    play = Play(SYNC, 2)

    def arguments(slot: WorkerSlot) -> tuple[int]:
        if slot.worker_id == 1:
            raise ValueError("no such seed")
        return (0,)

    with pytest.raises(ValueError, match="no such seed"):
        play.core.setup_call_begun(seed, arguments)
    play.join(2)
    assert play.called == []
    assert {slot.state for slot in play.core.slots} == {SlotState.SERVING}


@pytest.mark.parametrize("before", [False, True])
def test_workers_that_join_do_not_get_a_call_that_failed(before: bool) -> None:
    play = Play(SYNC, 2)
    if before:
        play.core.setup_call_begun(seed, lambda _: ("before",))
        answer(play, 0)
        answer(play, 1)
    call = play.core.setup_call_begun(seed, lambda _: ("bad",))
    play.take(play.called)
    error = WorkerError("no such seed")
    answer(play, 0, error)
    assert call.late
    answer(play, 1)
    assert (call.late, call.errors) == (set(), [error])
    play.join(2)
    assert play.take(play.called) == ([(2, "seed", "before")] if before else [])


def test_who_is_gone_or_leaves_is_not_awaited() -> None:
    play = Play(SYNC, 2)
    call = play.core.setup_call_begun(seed, lambda _: (1,))
    play.lose(0, replaced=True)
    assert call.late
    play.leave(1)
    assert not call.late
    answer(play, 0)
    assert not call.late
