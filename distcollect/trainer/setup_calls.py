"""What all workers, and those yet to come, are to know before they collect again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from distcollect.common.threads import missing
from distcollect.errors import DeadlineError, WorkerLost
from distcollect.trainer.fetcher import RolloutFetcher
from distcollect.trainer.pool_wait import PoolWait
from distcollect.trainer.requests import Requests
from distcollect.trainer.worker_slots import WorkerSlot, WorkerSlots
from distcollect.transport.protocol import Transport

Method = Callable[..., Future[None]]
Arguments = Callable[[WorkerSlot], Sequence[Any]]


class SetupCalls:
    """Calls of methods of the workers' services; the last call of each holds for newcomers too."""

    def __init__(
        self,
        transport: Transport,
        slots: WorkerSlots,
        requests: Requests,
        fetcher: RolloutFetcher,
        wait: PoolWait,
    ) -> None:
        """Nothing yet; for the arguments see :class:`~.pool.Pool`, which makes them."""
        self._transport = transport
        self._slots = slots
        self._requests = requests
        self._fetcher = fetcher
        self._wait = wait
        self._given: dict[Method, Arguments] = {}

    def give(self, method: Method, arguments: Arguments, timeout_s: float) -> None:
        """Have all know; rollouts from before are given up. Called without the pool's lock.

        Args:
            method: of :class:`~distcollect.transport.worker_service.WorkerService`.
            arguments: for it, which may differ from worker to worker.
            timeout_s: for all to answer.

        Raises:
            DeadlineError: some did not in time; names them.
            WorkerError: one of them failed.
        """
        with self._wait.lock:
            self._wait.check()
            self._fetcher.pauses = True
            self._given[method] = arguments
            self._requests.give_up_all()
            answers = {slot.worker_id: self._call(slot, method) for slot in self._slots}
        try:
            if late := missing(answers, timeout_s):
                raise DeadlineError(
                    f"workers {late} did not take the call {method.__name__!r} within "
                    f"{timeout_s:g} s: they finish the step that they are in first; "
                    "Faults(batch_timeout_s=...) gives longer"
                )
            for answer in answers.values():
                error = answer.exception()
                if error is not None and not isinstance(error, WorkerLost):
                    raise error
        finally:
            # Calls may overtake each other on their way, so only now may more be asked for.
            self._fetcher.pauses = False

    def give_newcomer(self, slot: WorkerSlot) -> None:
        """Have a worker know that has just joined. Called with the pool's lock held."""

        def knows(_: None) -> None:
            slot.pending_setup_calls -= 1

        for method in self._given:
            slot.pending_setup_calls += 1
            self._fetcher.then(slot, self._call(slot, method), knows)

    def _call(self, slot: WorkerSlot, method: Method) -> Future[None]:
        return self._transport.call(slot.peer, method, *self._given[method](slot))
