"""Decisions about which workers are in the run: each rule by itself."""

from __future__ import annotations

import math
from typing import Any

import pytest
from helpers.membership_cases import START_S, make

from distcollect.results import WorkerState
from distcollect.roster.membership import (
    Membership,
    MembershipCommand,
    Overdue,
    Ping,
    Start,
    WorkerPhase,
)


def working(now: float = 0.0, **settings: int) -> Membership:
    """A membership with one slot, whose first process is ready."""
    membership = make(**settings)
    membership.open(0, now)
    assert membership.tick(now) == [Start(0, 0)]
    membership.ready(0, 0, now)
    return membership


def watch(
    membership: Membership, now: float, until: float
) -> list[tuple[float, MembershipCommand]]:
    """Do what ``tick`` says whenever it is due, until ``until``; return the commands."""
    said: list[tuple[float, MembershipCommand]] = []
    looks_without_a_word = 0
    while (due := membership.next_tick(now)) <= until:
        now = max(now, due)
        commands = membership.tick(now)
        said += [(now, command) for command in commands]
        for command in commands:
            if isinstance(command, Overdue):
                membership.ended(command.worker_id, command.incarnation, now)
        looks_without_a_word = 0 if commands else looks_without_a_word + 1
        assert looks_without_a_word < 1000, "it gets nowhere"
    assert membership.tick(until) == []
    return said


def only(kind: type, said: list[tuple[float, MembershipCommand]]) -> list[tuple[float, Any]]:
    return [(when, command) for when, command in said if isinstance(command, kind)]


def test_a_process_has_to_be_ready_in_time() -> None:
    membership = make()
    membership.open(0, 0.0)
    membership.tick(0.0)
    assert watch(membership, 0.0, 50.0) == []
    membership.heard(0, 0, 50.0)
    assert watch(membership, 50.0, START_S - 0.001) == []
    (when, overdue), (_, start) = watch(membership, START_S - 0.001, START_S + 10)
    assert (overdue.worker_id, overdue.incarnation) == (0, 0)
    assert when == pytest.approx(START_S)
    assert "not ready within 100 s" in overdue.reason
    assert membership.state(0) is WorkerState.JOINING
    assert start == Start(0, 1)


def restarts(membership: Membership, now: float) -> list[float]:
    """Seconds from the end of each process to the start of the next, until none comes."""
    pauses = []
    while True:
        incarnation = len(pauses)
        assert membership.ended(0, incarnation, now)
        delay = membership.delay(0, now)
        due = membership.next_tick(now)
        assert (due == math.inf) == (delay is None)
        if delay is None:
            return pauses
        assert due == pytest.approx(now + delay)
        if delay:
            assert membership.tick(math.nextafter(due, 0)) == []
        assert membership.tick(due) == [Start(0, incarnation + 1)]
        pauses.append(due - now)
        now = due


def test_replacements_come_after_growing_pauses() -> None:
    membership = working(max_restarts=12)
    pauses = restarts(membership, 1.0)
    longest = [0, 0.5, 1, 2, 4, 8, 16, 30, 30, 30, 30, 30]
    assert len(pauses) == 12
    for pause, limit in zip(pauses, longest, strict=True):
        assert 0.75 * limit <= pause <= limit * 1.001
    assert len(set(pauses[-4:])) == 4, "who fails together would come back together"
    assert membership.state(0) is WorkerState.LOST
    assert membership.num_hopeful == 0


def test_hopeful_are_those_that_are_here_or_on_their_way() -> None:
    membership = make(max_restarts=0)
    for worker_id in range(5):
        membership.open(worker_id, 0.0)
    membership.tick(0.0)
    for worker_id in range(1, 5):
        membership.ready(worker_id, 0, 0.0)
    membership.leave(3, 1.0, 0.0)
    membership.ended(3, 0, 0.0)
    membership.ended(4, 0, 0.0)
    watch(membership, 0.0, 3.5)
    membership.heard(1, 0, 3.5)
    watch(membership, 3.5, 4.5)
    assert membership.states == {
        0: WorkerState.JOINING,
        1: WorkerState.READY,
        2: WorkerState.SUSPECTED,
        3: WorkerState.LEFT,
        4: WorkerState.LOST,
    }
    assert membership.num_hopeful == 3


def test_commands_come_in_the_order_in_which_they_were_due() -> None:
    membership = make()
    for worker_id, at in [(0, 5.0), (1, 3.0), (2, 4.0), (3, 3.0)]:
        membership.open(worker_id, at)
    membership.close(2)
    assert membership.next_tick(0.0) == 3.0
    assert membership.tick(9.0) == [Start(1, 0), Start(3, 0), Start(0, 0)]


def test_a_process_that_ends_in_order_is_watched_until_it_has_ended() -> None:
    membership = working()
    assert not membership.drained(0, 0, 5.0, 1.0)
    assert membership.drain(0, 0)
    assert not membership.drain(0, 0)
    assert only(Ping, watch(membership, 1.0, 3.0)), "it may take long to deliver its rollout"
    membership.heard(0, 0, 3.0)
    assert membership.drained(0, 0, 5.0, 3.0)
    assert (membership.phase(0), membership.state(0)) == (WorkerPhase.EXITING, WorkerState.READY)
    ((when, overdue), *_) = only(Overdue, watch(membership, 3.0, 9.0))
    assert when == pytest.approx(8.0)
    assert "took too long" in overdue.reason
    assert membership.state(0) is WorkerState.JOINING, "it was retired, and is replaced"
