"""Deadlines of many things that all have the same time limit."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Generic, TypeVar

T = TypeVar("T")


class Deadlines(Generic[T]):
    """Things that each have ``limit_s`` seconds from the moment at which they are added.

    They share one limit, so the oldest is due first. Each method takes constant time.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._at: OrderedDict[T, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._at)

    def __contains__(self, thing: T) -> bool:
        return thing in self._at

    def add(self, thing: T, now: float) -> None:
        """Add a thing, or give it its whole time again."""
        self._at.pop(thing, None)
        self._at[thing] = now + self.limit_s

    def discard(self, thing: T) -> None:
        """Remove a thing if it is there."""
        self._at.pop(thing, None)

    @property
    def oldest(self) -> T | None:
        """What was added first; None if there is nothing."""
        return next(iter(self._at), None)

    @property
    def next_at(self) -> float:
        """When the oldest is due; infinite if there is nothing."""
        return next(iter(self._at.values()), math.inf)

    def due(self, now: float) -> list[T]:
        """Those whose time is over, oldest first; they stay until they are discarded."""
        found = []
        for thing, at in self._at.items():
            if at > now:
                break
            found.append(thing)
        return found
