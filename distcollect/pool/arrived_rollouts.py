"""The rollouts that wait for delivery."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice

from distcollect.pool.worker_slots import RolloutRequest, RolloutState


class ArrivedRollouts:
    """The rollouts that wait for delivery, on their workers or here, in the order of arrival.

    Attributes:
        num_here: how many of them are on the trainer.
        num_fetching: how many are on their way to it.
    """

    def __init__(self) -> None:
        self.num_here = 0
        self.num_fetching = 0
        self._num_arrived = 0
        # Not a plain dict: finding the first key of that takes time when many were removed.
        self._all: OrderedDict[RolloutRequest, None] = OrderedDict()

    def __len__(self) -> int:
        """How many there are."""
        return len(self._all)

    def __iter__(self) -> Iterator[RolloutRequest]:
        """All of them, in the order of arrival."""
        return iter(self._all)

    def __contains__(self, request: RolloutRequest) -> bool:
        """Whether this one waits for delivery."""
        return request in self._all

    def first(self, count: int) -> list[RolloutRequest]:
        """The first ``count`` of them."""
        return list(islice(self._all, count))

    def first_ready(self) -> RolloutRequest | None:
        """The first that lies on its worker and is not being fetched."""
        # Few are passed over: those that were fetched ahead, or can't be.
        return next((r for r in self._all if r.state is RolloutState.READY), None)

    def all_here(self) -> list[RolloutRequest]:
        """Those that are on the trainer."""
        return [request for request in self._all if request.state is RolloutState.HERE]

    def add(self, request: RolloutRequest) -> None:
        """A rollout lies on its worker."""
        request.arrival = self._num_arrived
        self._num_arrived += 1
        self._all[request] = None
        request.slot.arrived.append(request)

    def fetching(self, request: RolloutRequest) -> None:
        """One is on its way to the trainer."""
        request.become(RolloutState.FETCHING)
        self.num_fetching += 1

    def here(self, request: RolloutRequest) -> None:
        """One that was on its way is on the trainer."""
        request.become(RolloutState.HERE)
        self.num_fetching -= 1
        self.num_here += 1

    def unreachable(self, request: RolloutRequest) -> None:
        """One that was on its way can't be fetched."""
        request.become(RolloutState.UNREACHABLE)
        self.num_fetching -= 1

    def remove(self, request: RolloutRequest) -> None:
        """One waits no longer."""
        del self._all[request]
        request.slot.arrived.remove(request)
        if request.state is RolloutState.FETCHING:
            self.num_fetching -= 1
        elif request.state is RolloutState.HERE:
            self.num_here -= 1

    def take_all(self) -> list[RolloutRequest]:
        """None waits any longer; those that did, in the order of arrival."""
        taken = list(self._all)
        self._all.clear()
        self.num_here = self.num_fetching = 0
        for request in taken:
            request.slot.arrived.clear()
        return taken
