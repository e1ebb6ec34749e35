"""Setup calls: their order, and what a failure of one leaves behind."""

from __future__ import annotations

from typing import Any

import pytest

from distcollect.errors import WorkerError
from distcollect.pool.pool_commands import Command, SetUp
from distcollect.pool.setup_calls import SetupCalls
from distcollect.pool.staleness import SentVersions
from distcollect.pool.worker_slots import SlotState, WorkerSlot, WorkerSlots


def seed(*_: Any) -> None: ...


def resume(*_: Any) -> None: ...


class Calls:
    """Setup calls of two workers, and the commands that they give."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, str, Any]] = []
        self.calls = SetupCalls(self.execute)
        self.slots = WorkerSlots(SentVersions())
        for worker_id in range(2):
            self.join(worker_id)

    def execute(self, command: Command) -> None:
        assert isinstance(command, SetUp)
        self.sent.append((command.slot.worker_id, command.method.__name__, *command.args))

    def join(self, worker_id: int) -> WorkerSlot:
        slot = self.slots.add(worker_id, 0, worker_id, 0)
        self.calls.joined(slot)
        return slot

    def take(self) -> list[tuple[int, str, Any]]:
        taken, self.sent = self.sent, []
        return taken


def test_a_worker_gets_one_call_after_the_other_and_the_newest_of_each_method() -> None:
    """Calls may overtake each other on their way."""
    world = Calls()
    first, second = world.slots
    calls = [
        world.calls.begin(method, lambda slot, i=i: (i,), world.slots)
        for i, method in enumerate([seed, resume, seed, seed])
    ]
    assert world.take() == [(0, "seed", 0), (1, "seed", 0)]
    assert [len(call.late) for call in calls] == [2, 2, 0, 2]
    for slot in (first, second):
        assert slot.state is SlotState.SETTING_UP
        answers = [world.calls.answered(slot) for _ in range(3)]
        assert answers == [slot is second] * 3
        assert slot.state is SlotState.SERVING
    assert world.take()[-2:] == [(1, "resume", 1), (1, "seed", 3)]
    joined = world.join(2)
    world.calls.answered(joined)
    assert sorted(world.take()) == [(2, "resume", 1), (2, "seed", 3)]


def test_arguments_that_can_not_be_made_change_nothing() -> None:
    world = Calls()

    def arguments(slot: WorkerSlot) -> tuple[int]:
        if slot.worker_id == 1:
            raise ValueError("no such seed")
        return (0,)

    with pytest.raises(ValueError, match="no such seed"):
        world.calls.begin(seed, arguments, world.slots)
    world.join(2)
    assert world.take() == []
    assert {slot.state for slot in world.slots} == {SlotState.SERVING}


@pytest.mark.parametrize("before", [False, True])
def test_workers_that_join_do_not_get_a_call_that_failed(before: bool) -> None:
    world = Calls()
    first, second = world.slots
    if before:
        world.calls.begin(seed, lambda _: ("before",), world.slots)
        world.calls.answered(first)
        world.calls.answered(second)
    call = world.calls.begin(seed, lambda _: ("bad",), world.slots)
    world.take()
    error = WorkerError("no such seed")
    assert not world.calls.answered(first, error)
    assert world.calls.answered(second)
    assert call.errors == [error]
    world.join(2)
    assert world.take() == ([(2, "seed", "before")] if before else [])


def test_who_is_gone_or_leaves_is_not_awaited() -> None:
    world = Calls()
    first, second = world.slots
    call = world.calls.begin(seed, lambda _: (1,), world.slots)
    assert not world.calls.gone(first)
    assert world.calls.gone(second)
    assert not call.late
    assert not world.calls.answered(first)
