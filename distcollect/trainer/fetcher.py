"""Asks workers for rollouts, and brings them here, as an :class:`~.order.Scheduler` has it.

A worker is asked, or a rollout fetched, whenever something has happened that may permit it: so what
happens ends with :meth:`RolloutFetcher.ask`.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from distcollect.common.clock import clock_ns
from distcollect.rollout.layout import Tensors
from distcollect.supervision.interfaces import FailureSink
from distcollect.telemetry.recorder import StatsRecorder
from distcollect.trainer.pool_wait import PoolWait
from distcollect.trainer.requests import Requests
from distcollect.trainer.worker_slots import BatchPlan, RolloutRequest, WorkerSlot
from distcollect.transport.protocol import Offer, Transport
from distcollect.transport.worker_service import WorkerService

T = TypeVar("T")

# Rollouts that lie fetched, or are being fetched, before the user asks: one is on its way while
# the user works on another. More would only make them older.
_PREFETCH = 2


class RolloutFetcher:
    """What goes out to workers, and what comes of it. All is called with the pool's lock held.

    Attributes:
        pauses: nobody is asked for anything now.
    """

    def __init__(
        self,
        transport: Transport,
        plan: BatchPlan,
        requests: Requests,
        wait: PoolWait,
        *,
        failure_sink: FailureSink,
        stats_recorder: StatsRecorder,
    ) -> None:
        """Ask nobody yet; for the arguments see :class:`~.pool.Pool`, which makes them."""
        self.pauses = False
        self._transport = transport
        self._requests = requests
        self._wait = wait
        self._failure_sink = failure_sink
        self._stats_recorder = stats_recorder
        # Nothing before the user asks: it may be for a rollout to hand over.
        self._max_fetched = plan.num_rollouts if plan.sync else 0
        self._hands_over = False

    def bring_here(self) -> None:
        """The user wants rollouts here: some are fetched ahead from now on."""
        self._max_fetched, self._hands_over = _PREFETCH, False

    def leave_there(self) -> None:
        """The user wants rollouts for others: none are fetched from now on."""
        self._max_fetched, self._hands_over = 0, True

    def ask(self) -> None:
        """Ask whoever can be asked for a rollout; called whenever that may have changed."""
        if self.pauses or self._wait.closed:
            return
        for slot in self._requests.next_slots():
            self._request(slot)

    def _request(self, slot: WorkerSlot) -> None:
        request, wire_request = self._requests.ask(slot, clock_ns())
        answer = self._transport.collect(slot.peer, wire_request)
        self.then(slot, answer, lambda offer: self._offered(request, offer))
        self._preempt()

    def _offered(self, request: RolloutRequest, offer: Offer) -> None:
        if not request.slot.gone:
            self._stats_recorder.collected(offer.header, request.asked_at)
        if not self._requests.offered(request, offer, clock_ns()):
            return
        self.fetch_ahead()
        if self._requests.may_end_early:
            self.preempt()

    def preempt(self) -> None:
        """Have those that collect for this batch, now or later, deliver what they have."""
        self._requests.end_early()
        self._preempt()

    def _preempt(self) -> None:
        for request in self._requests.to_preempt():
            request.preempted = True
            self._transport.call(request.slot.peer, WorkerService.preempt, request.number)

    def give_up_stale(self) -> None:
        """Keep nothing that is too stale to be handed on."""
        if self._requests.give_up_stale():
            self.ask()

    def fetch_ahead(self) -> None:
        """Fetch what there is room for, and what a worker that is to leave would take along."""
        self.give_up_stale()
        arrived = self._requests.arrived
        room = self._max_fetched
        for request in list(arrived):
            if request.rollout is not None or request.fetching:
                room -= 1
            # Meanwhile it may have been given up: a fetch may be over at once, and lead to more.
            elif (room > 0 or self._drains(request)) and request in arrived:
                self.fetch(request)
                room -= 1

    def _drains(self, request: RolloutRequest) -> bool:
        return request.slot.leaving and not self._hands_over

    def fetch(self, request: RolloutRequest) -> None:
        """Have a rollout come here, if it doesn't already."""
        if not request.lies_there:
            return
        offer = request.offer
        assert offer is not None
        request.fetching = True
        begin = clock_ns()

        def arrived(tensors: Tensors) -> None:
            header = offer.header
            self._stats_recorder.fetched(header.worker_id, header.num_bytes, clock_ns() - begin)
            self._requests.fetched(request, tensors)

        def failed() -> None:
            self._requests.not_fetched(request)

        self.then(request.slot, offer.fetch(), arrived, failed)

    def then(
        self,
        slot: WorkerSlot,
        answer: Future[T],
        arrived: Callable[[T], None],
        failed: Callable[[], None] | None = None,
    ) -> None:
        """Go on with a worker's answer, under the lock, once it is there."""

        def deliver(done: Future[T]) -> None:
            error = done.exception()
            with self._wait.lock:
                if self._wait.closed:
                    return
                if error is None:
                    arrived(done.result())
                elif failed is not None:
                    failed()
                if error is not None and not slot.gone:
                    # It is lost, or will be: what it owes is given up then.
                    self._failure_sink.report(slot.worker_id, slot.incarnation, error)
                self.ask()
                self._wait.changed.notify_all()

        answer.add_done_callback(deliver)
