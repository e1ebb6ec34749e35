"""When many things are due, each at a time of its own."""

from __future__ import annotations

import math
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

K = TypeVar("K")


class DueTimes(Generic[K]):
    """Times by key, in their order. Each operation takes time O(log n), on average over many."""

    def __init__(self) -> None:
        """Nothing is due."""
        self._times: dict[K, float] = {}
        self._num_set = 0
        # May hold entries of keys that were removed, or have another time by now. Of equal times
        # the one that was set first comes first.
        self._heap: list[tuple[float, int, K]] = []

    def __len__(self) -> int:
        """How many keys are due at some time."""
        return len(self._times)

    def set(self, key: K, time: float) -> None:
        """This key is due at ``time``, and at no other; never if that is infinite."""
        if time == self._times.get(key, math.inf):
            return
        if time == math.inf:
            del self._times[key]
            return
        self._times[key] = time
        self._num_set += 1
        heappush(self._heap, (time, self._num_set, key))
        if len(self._heap) > 2 * len(self._times) + 16:
            self._heap = [entry for entry in self._heap if self._times.get(entry[2]) == entry[0]]
            heapify(self._heap)

    @property
    def first(self) -> float:
        """The earliest time; infinite if there is none."""
        while self._heap:
            time, _, key = self._heap[0]
            if self._times.get(key) == time:
                return time
            heappop(self._heap)
        return math.inf

    def take(self, now: float) -> list[K]:
        """The keys that are due at ``now``, the earliest first. They are removed."""
        taken = []
        while self.first <= now:
            _, _, key = heappop(self._heap)
            del self._times[key]
            taken.append(key)
        return taken
