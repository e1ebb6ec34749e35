"""When an inference server computes the requests that wait."""

from __future__ import annotations

from distcollect.inference.batching import Batching

MS = 1_000_000


def with_habits(pauses_ms: dict[str, int], forward_ms: int = 2) -> tuple[Batching, int]:
    """Callers that have asked a few times, each after its pause, and the time when it is over."""
    batching, now = Batching(), MS
    for _ in range(6):
        for caller, pause in sorted(pauses_ms.items(), key=lambda item: item[1]):
            batching.asked(caller, now + pause * MS)
        now += max(pauses_ms.values()) * MS
        batching.answered(pauses_ms, now, forward_ms * MS)
    return batching, now


def test_nothing_is_due_while_nobody_asks() -> None:
    assert Batching().wait_ns(5) is None
    batching, now = with_habits({"a": 10})
    assert batching.wait_ns(now) is None


def test_half_of_the_callers_are_enough() -> None:
    batching, now = with_habits(dict.fromkeys("abcd", 10))
    batching.asked("a", now + 9 * MS)
    assert batching.wait_ns(now + 9 * MS) == 2 * MS
    batching.asked("b", now + 10 * MS)
    assert batching.wait_ns(now + 10 * MS) == 0


def test_the_first_waits_no_longer_than_a_forward_pass_or_5_ms() -> None:
    for forward_ms, most_ms in ((2, 2), (50, 5)):
        batching, now = with_habits(dict.fromkeys("abcd", 100), forward_ms)
        batching.asked("a", now)
        assert batching.wait_ns(now) == most_ms * MS
        assert batching.wait_ns(now + most_ms * MS) == 0


def test_who_is_late_is_not_waited_for() -> None:
    batching, now = with_habits(dict.fromkeys("abc", 10))
    batching.asked("a", now + 10 * MS)
    assert batching.wait_ns(now + 10 * MS) == 2 * MS
    later = now + 40 * MS  # the others have not asked for four times as long as they used to
    batching.answered(["a"], now + 11 * MS, 2 * MS)
    batching.asked("a", later)
    assert batching.wait_ns(later) == 0


def test_who_has_ended_is_not_waited_for() -> None:
    batching, now = with_habits(dict.fromkeys("abc", 10))
    batching.asked("a", now + MS)
    assert batching.wait_ns(now + MS) == 2 * MS
    batching.gone("b")
    assert batching.wait_ns(now + MS) == 0
    batching.gone("a")
    assert batching.wait_ns(now + MS) is None


def test_a_request_that_is_made_again_replaces_the_one_before() -> None:
    batching, now = with_habits(dict.fromkeys("abcd", 10))
    batching.asked("a", now)
    batching.asked("a", now + MS)
    assert batching.wait_ns(now + MS) == 2 * MS
