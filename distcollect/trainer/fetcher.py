"""Asks workers for rollouts, and brings them here, as an :class:`~.order.Order` has it.

A worker is asked, or a rollout fetched, whenever something has happened that may permit it: so what
happens ends with :meth:`Gathering.ask`.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from distcollect.common.clock import clock_ns
from distcollect.rollout.layout import Tensors
from distcollect.supervision.interfaces import Reports
from distcollect.telemetry.recorder import Book
from distcollect.trainer.pool_wait import Waiting
from distcollect.trainer.requests import Requests
from distcollect.trainer.worker_slots import Asked, BatchPlan, Seat
from distcollect.transport.protocol import Offer, Transport

T = TypeVar("T")

# Rollouts that lie fetched, or are being fetched, before the user asks: one is on its way while
# the user works on another. More would only make them older.
_PREFETCH = 2


class Gathering:
    """What goes out to workers, and what comes of it. All is called with the pool's lock held.

    Attributes:
        pauses: nobody is asked for anything now.
    """

    def __init__(
        self,
        transport: Transport,
        plan: BatchPlan,
        requests: Requests,
        waiting: Waiting,
        *,
        reports: Reports,
        book: Book,
    ) -> None:
        """Ask nobody yet; for the arguments see :class:`~.pool.Pool`, which makes them."""
        self.pauses = False
        self._transport = transport
        self._requests = requests
        self._waiting = waiting
        self._reports = reports
        self._book = book
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
        if self.pauses or self._waiting.closed:
            return
        for seat in self._requests.whom():
            self._request(seat)

    def _request(self, seat: Seat) -> None:
        asked, request = self._requests.ask(seat, clock_ns())
        answer = self._transport.collect(seat.peer, request)
        self.then(seat, answer, lambda offer: self._offered(asked, offer))
        self._preempt()

    def _offered(self, asked: Asked, offer: Offer) -> None:
        if not asked.seat.gone:
            self._book.collected(offer.header, asked.asked_at)
        if not self._requests.offered(asked, offer, clock_ns()):
            return
        self.fetch_ahead()
        if self._requests.may_end_early:
            self.preempt()

    def preempt(self) -> None:
        """Have those that collect for this batch, now or later, deliver what they have."""
        self._requests.end_early()
        self._preempt()

    def _preempt(self) -> None:
        for asked in self._requests.to_preempt():
            asked.preempted = True
            self._transport.call(asked.seat.peer, "preempt", asked.number)

    def give_up_stale(self) -> None:
        """Keep nothing that is too stale to be handed on."""
        if self._requests.give_up_stale():
            self.ask()

    def fetch_ahead(self) -> None:
        """Fetch what there is room for, and what a worker that is to leave would take along."""
        self.give_up_stale()
        arrived = self._requests.arrived
        room = self._max_fetched
        for asked in list(arrived):
            if asked.rollout is not None or asked.fetching:
                room -= 1
            # Meanwhile it may have been given up: a fetch may be over at once, and lead to more.
            elif (room > 0 or self._drains(asked)) and asked in arrived:
                self.fetch(asked)
                room -= 1

    def _drains(self, asked: Asked) -> bool:
        return asked.seat.leaving and not self._hands_over

    def fetch(self, asked: Asked) -> None:
        """Have a rollout come here, if it doesn't already."""
        if not asked.lies_there:
            return
        offer = asked.offer
        assert offer is not None
        asked.fetching = True
        begin = clock_ns()

        def arrived(tensors: Tensors) -> None:
            header = offer.header
            self._book.fetched(header.worker_id, header.num_bytes, clock_ns() - begin)
            self._requests.fetched(asked, tensors)

        def failed() -> None:
            self._requests.not_fetched(asked)

        self.then(asked.seat, offer.fetch(), arrived, failed)

    def then(
        self,
        seat: Seat,
        answer: Future[T],
        arrived: Callable[[T], None],
        failed: Callable[[], None] | None = None,
    ) -> None:
        """Go on with a worker's answer, under the lock, once it is there."""

        def deliver(done: Future[T]) -> None:
            error = done.exception()
            with self._waiting.lock:
                if self._waiting.closed:
                    return
                if error is None:
                    arrived(done.result())
                elif failed is not None:
                    failed()
                if error is not None and not seat.gone:
                    # It is lost, or will be: what it owes is given up then.
                    self._reports.report(seat.worker_id, seat.incarnation, error)
                self.ask()
                self._waiting.changed.notify_all()

        answer.add_done_callback(deliver)
