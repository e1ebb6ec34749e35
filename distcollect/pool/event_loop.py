"""Hands the core of the pool one event at a time, and executes what it commands."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from distcollect.common.clock import clock_ns
from distcollect.errors import EnvError
from distcollect.pool.pool_commands import PoolCommands, Wanted
from distcollect.pool.pool_core import PoolCore
from distcollect.pool.worker_slots import RolloutRequest, WorkerSlot
from distcollect.rollout.layout import Tensors
from distcollect.roster.interfaces import FailureSink
from distcollect.telemetry.recorder import Activity, StatsRecorder
from distcollect.transport.protocol import Offer, Transport
from distcollect.transport.worker_service import WorkerService

T = TypeVar("T")


class EventLoop(PoolCommands):
    """The pool's only lock, the queue of its events, and the commands of its core.

    Attributes:
        core: decides what is done.
        lock: protects the core. It is reentrant, as an answer may come before the call that asks
            for it returns; no event enters the core while the core handles another.
    """

    core: PoolCore  # set by whoever makes the core, which is given its loop

    def __init__(
        self,
        transport: Transport,
        failure_sink: FailureSink,
        stats_recorder: StatsRecorder,
        *,
        deliver: Callable[[Wanted, Sequence[RolloutRequest]], None],
        wake_user: Callable[[], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        """Start without events.

        Args:
            transport: see :class:`~.pool.Pool`, as for the next two.
            failure_sink: is told of workers.
            stats_recorder: what to count in.
            deliver: gives the user a batch.
            wake_user: wakes the user's threads that wait for anything else.
            fail: ends the run, after an error in the pool itself.
        """
        self.lock = threading.RLock()
        self._is_handling = False
        self._transport = transport
        self._failure_sink = failure_sink
        self._stats_recorder = stats_recorder
        self._deliver = deliver
        self._wake_user = wake_user
        self._fail = fail
        self._events: deque[tuple[Any, ...]] = deque()  # see post()

    # Events.

    def post(self, *event: Any) -> None:
        """Have the core handle an event, after those that came before.

        If another thread handles events now, it handles this one too. A thread that holds the lock
        finds it handled when this returns, unless it is within an event.

        Args:
            event: a function and its arguments; one tuple, as many events may wait.
        """
        self._events.append(event)
        # Else the thread that handles events sees it: it looks once more after it has ended.
        if not self._is_handling:
            with self.lock:
                self._drain()

    def do(self, event: Callable[..., T], *args: Any) -> T:
        """Have the core handle an event of the user's thread now; return what that returns."""
        with self.lock:
            was_handling, self._is_handling = self._is_handling, True
            try:
                return event(*args)
            finally:
                self._is_handling = was_handling
                self._drain()

    def _drain(self) -> None:
        """Handle all events, one after the other.

        A transport may answer before its method returns: that answer is an event like any other.
        """
        if self._is_handling:
            return
        while self._events:
            self._is_handling = True
            try:
                while self._events:
                    event = self._events.popleft()
                    event[0](*event[1:])
            except Exception as error:
                self._fail(error)
                raise
            finally:
                self._is_handling = False

    # Commands.

    def call(
        self, slot: WorkerSlot, method: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Future[Any]:
        """Call a method of a worker's service."""
        return self._transport.call(slot.peer, method, *args, **kwargs)

    def collect(self, request: RolloutRequest) -> None:
        request.asked_at = clock_ns()
        deliver = partial(self.post, self._collected, request)
        self._transport.collect(request.slot.peer, request.wire_request, deliver)

    def _collected(
        self, request: RolloutRequest, offer: Offer, error: BaseException | None
    ) -> None:
        if self.core.closed:
            return
        if error is not None:
            self.core.failed(request.slot, error)
            return
        if not request.slot.is_gone:
            self._stats_recorder.collected(offer.header, request.asked_at)
        self.core.offered(request, offer, clock_ns())

    def preempt(self, request: RolloutRequest) -> None:
        self.call(request.slot, WorkerService.preempt, request.number)

    def fetch(self, request: RolloutRequest, offer: Offer) -> None:
        request.asked_at = clock_ns()
        offer.fetch(partial(self.post, self._fetched, request))

    def _fetched(
        self, request: RolloutRequest, tensors: Tensors, error: BaseException | None
    ) -> None:
        if self.core.closed:
            return
        if error is not None:
            self.core.not_fetched(request, error)
            return
        header, took_ns = request.known_header, clock_ns() - request.asked_at
        self._stats_recorder.fetched(header.worker_id, header.num_bytes, took_ns)
        self.core.fetched(request, tensors)

    def _when_answered(
        self, answer: Future[Any], then: Callable[[Any, BaseException | None], None]
    ) -> None:
        """Call this with a worker's answer, or the error, when it is there."""
        # Nothing here refers to ``answer``: only the garbage collector could free that cycle.
        answer.add_done_callback(partial(self.post, self._answered, then))

    def _answered(
        self, then: Callable[[Any, BaseException | None], None], answer: Future[Any]
    ) -> None:
        if not self.core.closed:
            error = answer.exception()
            then(None if error is not None else answer.result(), error)

    def keep(self, request: RolloutRequest, keep_s: float) -> None:
        peer, key = request.slot.peer, request.key
        answer = self._transport.hand_over(peer, request.number, key, keep_s)
        self._when_answered(answer, partial(self._kept, request))

    def _kept(self, request: RolloutRequest, held: Any, error: BaseException | None) -> None:
        if error is not None:
            self.core.not_kept(request, error)
            return
        outcome = self.call(request.slot, WorkerService.handover_outcome, request.key)
        self._when_answered(outcome, partial(self._kept_no_longer, request))
        self.core.kept(request, held)

    def _kept_no_longer(
        self, request: RolloutRequest, is_taken: bool, error: BaseException | None
    ) -> None:
        if error is not None:
            self.core.not_kept(request, error)
        else:
            self.core.kept_no_longer(request, is_taken=is_taken)

    def take_back(self, request: RolloutRequest) -> None:
        self.call(request.slot, WorkerService.cancel_handover, request.key)

    def set_up(self, slot: WorkerSlot, method: Callable[..., Any], args: Sequence[Any]) -> None:
        answer = self.call(slot, method, *args)
        self._when_answered(answer, lambda _, error: self.core.set_up(slot, error))

    def report_failure(self, slot: WorkerSlot, error: BaseException, *, is_final: bool) -> None:
        if isinstance(error, EnvError) and error.num_env_faults:
            ledger = self.core.requests.ledger
            ledger.env_failed(slot.worker_id, slot.incarnation, error.num_env_faults)
            self._stats_recorder.env_failed(error.env_faults)
        self._failure_sink.report(slot.worker_id, slot.incarnation, error, is_final=is_final)

    def report_drained(self, slot: WorkerSlot) -> None:
        self._failure_sink.drained(slot.worker_id, slot.incarnation)

    def note_activity(self, activity: Activity) -> None:
        self._stats_recorder.switch_to(activity)

    def deliver(self, wanted: Wanted, requests: Sequence[RolloutRequest]) -> None:
        self._deliver(wanted, requests)

    def wake_user(self) -> None:
        self._wake_user()
