"""Limits on how often something happens. Nothing here reads a clock: callers pass the time."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Allowance:
    """How many times something may be done: ``burst`` times at once, and ``per_s`` in the long run.

    Times are in seconds of one monotonic clock.
    """

    def __init__(self, burst: int, per_s: float) -> None:
        self._burst = burst
        self._per_s = per_s
        self._left = float(burst)
        self._counted_at = -math.inf

    def take(self, now: float) -> bool:
        """Use one, if one is left."""
        if self._counted_at > -math.inf:
            gained = (now - self._counted_at) * self._per_s
            self._left = min(float(self._burst), self._left + gained)
        self._counted_at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True

    def give_back(self) -> None:
        """Take back one use."""
        self._left = min(float(self._burst), self._left + 1)

    def next_at(self, now: float) -> float:
        """When :meth:`take` can succeed next, after it has failed at ``now``."""
        return now + (1 - self._left) / self._per_s


@dataclass
class _Repeats:
    period_ends: float
    passed: int = 0
    held_back: int = 0


class RepeatLimit(Generic[K]):
    """Lets the first ``burst`` events of a kind in each period pass, and counts the others.

    For log lines: the others are told together, as a number, when the period is over.

    Attributes:
        period_s: the period's length in seconds.
    """

    def __init__(self, burst: int, period_s: float) -> None:
        self.period_s = period_s
        self._burst = burst
        self._kinds: dict[K, _Repeats] = {}

    def passes(self, kind: K, now: float) -> bool:
        """Whether this event is one of the first in its period; otherwise it is counted."""
        repeats = self._kinds.setdefault(kind, _Repeats(now + self.period_s))
        if repeats.passed < self._burst:
            repeats.passed += 1
            return True
        repeats.held_back += 1
        return False

    @property
    def next_at(self) -> float:
        """When the first of the present periods ends; infinite if there is none."""
        return min((r.period_ends for r in self._kinds.values()), default=math.inf)

    def ended(self, now: float) -> dict[K, int]:
        """The kinds whose period is over, with the number of events that did not pass."""
        over = {k: r.held_back for k, r in self._kinds.items() if r.period_ends <= now}
        for kind in over:
            del self._kinds[kind]
        return over
