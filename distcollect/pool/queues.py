"""Workers and requests in an order: no operation looks at all of them.

Pure: no clock, no thread, no socket.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import TypeAlias

from distcollect.pool.worker_slots import RolloutRequest, WorkerSlot

# The key of a slot, and the slot; one tuple, as garbage collection looks at each. The three numbers
# are different for all slots: slots can't be compared.
_Entry: TypeAlias = tuple[int, int, int, WorkerSlot]


class SlotLine:
    """Slots in the order in which they were put in. Each operation takes constant time."""

    def __init__(self) -> None:
        """Start empty."""
        # Not a plain dict: finding the first key of that takes time when many were removed.
        self._slots: OrderedDict[WorkerSlot, None] = OrderedDict()

    def put(self, slot: WorkerSlot, *, present: bool = True) -> None:
        """Have ``slot`` in the line, or not; one that is in it keeps its place."""
        if present:
            self._slots[slot] = None
        else:
            self._slots.pop(slot, None)

    def first(self) -> WorkerSlot | None:
        """The slot that was put in first; None if there is none."""
        return next(iter(self._slots), None)


class SlotQueue:
    """Slots in the order of a key. Each operation takes time O(log n).

    A slot's key may change while it is in the queue: :meth:`put` it again then.
    """

    def __init__(self, key: Callable[[WorkerSlot], _Entry]) -> None:
        """Start empty; ``key`` makes the entry of a slot, and no two slots have the same."""
        self._key = key
        self._entries: dict[WorkerSlot, _Entry] = {}
        # May hold entries of slots that were removed, or had another key.
        self._heap: list[_Entry] = []

    def __len__(self) -> int:
        """How many slots are in it."""
        return len(self._entries)

    def __contains__(self, slot: WorkerSlot) -> bool:
        """Whether a slot is in it."""
        return slot in self._entries

    def put(self, slot: WorkerSlot, *, present: bool = True) -> None:
        """Have ``slot`` in the queue, or not."""
        if not present:
            self._entries.pop(slot, None)
            return
        entry = self._key(slot)
        if self._entries.get(slot) == entry:
            return
        self._entries[slot] = entry
        heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._entries) + 16:
            self._heap = list(self._entries.values())
            heapify(self._heap)

    def first(self) -> WorkerSlot | None:
        """The slot with the lowest key; None if the queue is empty."""
        heap, entries = self._heap, self._entries
        while heap:
            entry = heap[0]
            slot = entry[-1]
            if entries.get(slot) is entry:
                return slot
            heappop(heap)
        return None


def by_last_request(slot: WorkerSlot) -> _Entry:
    """Order by the time of the last request: the slot that has waited longest comes first."""
    return slot.last_request, slot.joined, 0, slot


def by_turn(slot: WorkerSlot) -> _Entry:
    """Order by deliveries: the slot that has delivered least comes first."""
    return slot.turn, slot.worker_id, slot.joined, slot


class RequestQueue:
    """Requests in the order of a key; those that are not wanted any more leave by themselves.

    Each operation takes time O(log n), on average over many.
    """

    def __init__(
        self,
        key: Callable[[RolloutRequest], tuple[int, int]],
        is_wanted: Callable[[RolloutRequest], bool],
    ) -> None:
        """Start empty; no two requests have the same ``key``."""
        self._key = key
        self._is_wanted = is_wanted
        self._heap: list[tuple[tuple[int, int], RolloutRequest]] = []
        self._max_length = 16

    def put(self, request: RolloutRequest) -> None:
        """Have a request in the queue."""
        heappush(self._heap, (self._key(request), request))
        if len(self._heap) > self._max_length:
            self.sort_again()
            self._max_length = 2 * len(self._heap) + 16

    def sort_again(self) -> None:
        """Keys have changed. Takes time O(n)."""
        requests = [request for _, request in self._heap if self._is_wanted(request)]
        self._heap = [(self._key(request), request) for request in requests]
        heapify(self._heap)

    def first(self) -> RolloutRequest | None:
        """The request with the lowest key; None if there is none."""
        while self._heap:
            _, request = self._heap[0]
            if self._is_wanted(request):
                return request
            heappop(self._heap)
        return None
