"""Limits on how often something happens, and deadlines; with times that the tests choose."""

from __future__ import annotations

import math

from distcollect.common.deadlines import Deadlines
from distcollect.common.rate_limit import Allowance, RepeatLimit


def test_an_allowance_is_a_burst_and_then_a_rate() -> None:
    allowance = Allowance(burst=3, per_s=2.0)
    assert [allowance.take(10.0) for _ in range(4)] == [True, True, True, False]
    assert allowance.next_at(10.0) == 10.5
    assert not allowance.take(10.4)
    assert allowance.take(10.5)
    taken = sum(allowance.take(10.5 + n / 100) for n in range(1000))
    assert taken == 19  # in 9.99 s
    assert [allowance.take(1000.0) for _ in range(4)] == [True, True, True, False]


def test_what_is_given_back_can_be_taken_again() -> None:
    allowance = Allowance(burst=1, per_s=0.001)
    for _ in range(100):
        assert allowance.take(5.0)
        assert not allowance.take(5.0)
        allowance.give_back()


def test_repeats_are_counted_by_kind() -> None:
    repeats: RepeatLimit[str] = RepeatLimit(burst=2, period_s=10.0)
    assert repeats.next_at == math.inf
    assert [repeats.passes("one", 0.0) for _ in range(5)] == [True, True, False, False, False]
    assert repeats.passes("other", 4.0)
    assert repeats.next_at == 10.0
    assert repeats.ended(9.9) == {}
    assert repeats.ended(10.0) == {"one": 3}
    assert repeats.passes("one", 11.0)
    assert repeats.ended(30.0) == {"one": 0, "other": 0}
    assert repeats.next_at == math.inf


def test_the_oldest_is_due_first() -> None:
    deadlines: Deadlines[str] = Deadlines(10.0)
    assert deadlines.next_at == math.inf
    for n, name in enumerate("abcd"):
        deadlines.add(name, float(n))
    assert (deadlines.oldest, deadlines.next_at) == ("a", 10.0)
    deadlines.discard("a")
    deadlines.discard("a")
    deadlines.add("b", 5.0)  # it has its whole time again
    assert deadlines.due(12.0) == ["c"]
    assert deadlines.due(15.0) == ["c", "d", "b"]
    assert len(deadlines) == 3
    assert "b" in deadlines
