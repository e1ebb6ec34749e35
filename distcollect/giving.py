"""The side of the trainer that hands rollouts over to others, see :mod:`.handover`."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from functools import partial

from .gathering import Gathering
from .requests import Requests
from .seats import Asked
from .threads import LOOK_UP_S
from .transport import Transport
from .waiting import Waiting

# At the end, for workers to say which of the rollouts that they keep were taken after all.
_TAKE_BACK_S = 2.0


class Giver:
    """Has workers keep rollouts for others to take. All is called with the pool's lock held."""

    def __init__(
        self, transport: Transport, requests: Requests, gathering: Gathering, waiting: Waiting
    ) -> None:
        """Nothing is given yet; for the arguments see :class:`~.pool.Pool`, which makes them."""
        self._transport = transport
        self._requests = requests
        self._gathering = gathering
        self._waiting = waiting
        self._untaken = "not_taken"  # the cause for one that nobody took

    def next(self, keep_s: float) -> Callable[[], tuple[Asked, str] | None]:
        """What gives the next rollout, with its key, once its worker keeps it or it came here."""
        given: tuple[Asked, str] | None = None

        def ready() -> tuple[Asked, str] | None:
            nonlocal given
            if given is None or given[0].failed:
                given = self._give(keep_s)
            if given is None:
                return None
            asked, _ = given
            return given if asked.kept or asked.rollout is not None else None

        return ready

    def _give(self, keep_s: float) -> tuple[Asked, str] | None:
        """Have a worker keep what lies there, if anything does; with its key."""
        self._gathering.give_up_stale()
        asked = self._requests.to_hand_over()
        if asked is None:
            return None
        key = secrets.token_hex(8)
        if asked.rollout is not None:
            self._requests.deliver(asked)
        else:
            self._keep(asked, key, keep_s)
        return asked, key

    def _keep(self, asked: Asked, key: str, keep_s: float) -> None:
        """Have its worker keep a rollout, and account for it."""
        seat, call = asked.seat, self._transport.call
        self._requests.keep(asked, key)

        def over(taken: bool) -> None:
            self._requests.keep_no_longer(asked, None if taken else self._untaken)

        def kept(_: None) -> None:
            asked.kept = True
            self._gathering.then(seat, call(seat.peer, "handed_over", key), over, lost)

        lost = partial(self._requests.keep_no_longer, asked, "worker_lost")
        answer = call(seat.peer, "hand_over", asked.number, key, keep_s)
        self._gathering.then(seat, answer, kept, lost)

    def take_back(self) -> None:
        """Learn for certain which of the rollouts that may still be taken were."""
        self._untaken = "shut_down"
        for asked, key in self._requests.kept.items():
            self._transport.call(asked.seat.peer, "take_back", key)
        deadline = time.monotonic() + _TAKE_BACK_S
        while self._requests.kept and (remaining := deadline - time.monotonic()) > 0:
            self._waiting.changed.wait(min(remaining, LOOK_UP_S))
