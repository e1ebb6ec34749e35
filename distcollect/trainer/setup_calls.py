"""What all workers, and those yet to come, are to know before they collect again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from distcollect.common.threads import missing
from distcollect.errors import DeadlineError, WorkerLost
from distcollect.trainer.fetcher import Gathering
from distcollect.trainer.pool_wait import Waiting
from distcollect.trainer.requests import Requests
from distcollect.trainer.worker_slots import Seat, Seats
from distcollect.transport.protocol import Transport

Arguments = Callable[[Seat], Sequence[Any]]


class Instructions:
    """Calls of methods of the workers' services; the last call of each holds for newcomers too."""

    def __init__(
        self,
        transport: Transport,
        seats: Seats,
        requests: Requests,
        gathering: Gathering,
        waiting: Waiting,
    ) -> None:
        """Nothing yet; for the arguments see :class:`~.pool.Pool`, which makes them."""
        self._transport = transport
        self._seats = seats
        self._requests = requests
        self._gathering = gathering
        self._waiting = waiting
        self._given: dict[str, Arguments] = {}

    def give(self, method: str, arguments: Arguments, timeout_s: float) -> None:
        """Have all know; rollouts from before are given up. Called without the pool's lock.

        Args:
            method: of the service.
            arguments: for it, which may differ from worker to worker.
            timeout_s: for all to answer.

        Raises:
            DeadlineError: some did not in time; names them.
            WorkerError: one of them failed.
        """
        with self._waiting.lock:
            self._waiting.check()
            self._gathering.pauses = True
            self._given[method] = arguments
            self._requests.give_up_all()
            answers = {seat.worker_id: self._call(seat, method) for seat in self._seats}
        try:
            if late := missing(answers, timeout_s):
                raise DeadlineError(
                    f"workers {late} did not take the call {method!r} within {timeout_s:g} s: they "
                    "finish the step that they are in first; Faults(batch_timeout_s=...) gives "
                    "longer"
                )
            for answer in answers.values():
                error = answer.exception()
                if error is not None and not isinstance(error, WorkerLost):
                    raise error
        finally:
            # Calls may overtake each other on their way, so only now may more be asked for.
            self._gathering.pauses = False

    def give_newcomer(self, seat: Seat) -> None:
        """Have a worker know that has just joined. Called with the pool's lock held."""

        def knows(_: None) -> None:
            seat.untold -= 1

        for method in self._given:
            seat.untold += 1
            self._gathering.then(seat, self._call(seat, method), knows)

    def _call(self, seat: Seat, method: str) -> Future[None]:
        return self._transport.call(seat.peer, method, *self._given[method](seat))
