"""Times of many things, in their order."""

from __future__ import annotations

import math
import random

from distcollect.common.due_times import DueTimes


def test_what_is_due_first_is_taken_first() -> None:
    due: DueTimes[str] = DueTimes()
    assert due.first == math.inf
    assert due.take(1e9) == []
    for key, time in [("late", 9.0), ("early", 1.0), ("same", 2.0), ("as the one before", 2.0)]:
        due.set(key, time)
    assert due.first == 1.0
    assert due.take(0.5) == []
    assert due.take(2.0) == ["early", "same", "as the one before"]
    assert due.take(2.0) == []
    assert (due.first, len(due)) == (9.0, 1)


def test_a_key_has_one_time() -> None:
    due: DueTimes[str] = DueTimes()
    due.set("moved", 1.0)
    due.set("removed", 1.5)
    due.set("moved", 3.0)
    due.set("removed", math.inf)
    due.set("unknown", math.inf)
    assert (due.first, len(due)) == (3.0, 1)
    due.set("moved", 2.0)
    due.set("moved", 1.0)  # a time that it had before
    assert due.take(5.0) == ["moved"]
    assert due.take(5.0) == []


def test_it_agrees_with_a_plain_dict_and_does_not_grow() -> None:
    rng = random.Random(0)
    due: DueTimes[int] = DueTimes()
    times: dict[int, float] = {}
    now = 0.0
    for _ in range(5000):
        key, time = rng.randrange(20), rng.choice([math.inf, now + rng.randrange(50)])
        due.set(key, time)
        times[key] = time
        assert due.first == min(times.values())
        assert len(due._heap) <= 60
        if rng.random() < 0.1:
            now += rng.random() * 20
            taken = due.take(now)
            assert sorted(taken) == sorted(key for key, time in times.items() if time <= now)
            order = [times.pop(key) for key in taken]
            assert order == sorted(order)
