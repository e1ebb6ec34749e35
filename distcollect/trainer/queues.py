"""Workers and requests in an order: no operation looks at all of them.

Pure: no clock, no thread, no socket.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from heapq import heapify, heappop, heappush

from distcollect.trainer.worker_slots import RolloutRequest, WorkerSlot


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

    def __init__(self, key: Callable[[WorkerSlot], tuple[int, int]]) -> None:
        """Start empty; no two slots have the same ``key``."""
        self._key = key
        self._keys: dict[WorkerSlot, tuple[int, int]] = {}
        # May hold entries of slots that were removed, or had another key.
        self._heap: list[tuple[tuple[int, int], int, WorkerSlot]] = []

    def __len__(self) -> int:
        """How many slots are in it."""
        return len(self._keys)

    def __contains__(self, slot: WorkerSlot) -> bool:
        """Whether a slot is in it."""
        return slot in self._keys

    def put(self, slot: WorkerSlot, *, present: bool = True) -> None:
        """Have ``slot`` in the queue, or not."""
        if not present:
            self._keys.pop(slot, None)
            return
        key = self._key(slot)
        if self._keys.get(slot) == key:
            return
        self._keys[slot] = key
        heappush(self._heap, (key, slot.joined, slot))
        if len(self._heap) > 2 * len(self._keys) + 16:
            self._heap = [(key, slot.joined, slot) for slot, key in self._keys.items()]
            heapify(self._heap)

    def first(self) -> WorkerSlot | None:
        """The slot with the lowest key; None if the queue is empty."""
        while self._heap:
            key, _, slot = self._heap[0]
            if self._keys.get(slot) == key:
                return slot
            heappop(self._heap)
        return None


def by_last_request(slot: WorkerSlot) -> tuple[int, int]:
    """Order by the time of the last request: the slot that has waited longest comes first."""
    return slot.last_request, slot.joined


def by_turn(slot: WorkerSlot) -> tuple[int, int]:
    """Order by deliveries: the slot that has delivered least comes first."""
    return slot.turn, slot.worker_id


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
