"""Hands the core of the pool one event at a time, and executes what it commands."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from distcollect.common.clock import clock_ns
from distcollect.errors import EnvError
from distcollect.pool.pool_commands import Wanted
from distcollect.pool.pool_core import PoolCore
from distcollect.pool.worker_slots import RolloutRequest, WorkerSlot
from distcollect.rollout.layout import Tensors
from distcollect.roster.interfaces import FailureSink
from distcollect.telemetry.recorder import Activity, StatsRecorder
from distcollect.transport.protocol import Offer, Transport
from distcollect.transport.worker_service import WorkerService

T = TypeVar("T")


class EventLoop:
    """The pool's only lock, the queue of its events, and the :class:`.PoolCommands` of its core.

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
    ) -> None:
        """Start without events.

        Args:
            transport: see :class:`~.pool.Pool`, as for the next two.
            failure_sink: is told of workers.
            stats_recorder: what to count in.
            deliver: gives the user a batch.
            wake_user: wakes the user's threads that wait for anything else.
        """
        self.lock = threading.RLock()
        self._is_handling = False
        self._failure: Exception | None = None  # the first one of what is handled now
        self._transport = transport
        self._failure_sink = failure_sink
        self._stats_recorder = stats_recorder
        self._deliver = deliver
        self._wake_user = wake_user
        self._events: deque[tuple[Any, ...]] = deque()  # see post()
        # Bound once: of each, one for each open rollout would be much to do for garbage collection.
        self._post = self.post
        self._post_collected = partial(self.post, self._note_collected)
        self._post_fetched = partial(self.post, self._note_fetched)

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
                    with self._going_on():
                        event = self._events.popleft()
                        event[0](*event[1:])
            finally:
                self._is_handling = False
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    @contextmanager
    def _going_on(self, slot: WorkerSlot | None = None) -> Iterator[None]:
        """Raise an error of one event or command only after all others.

        A worker, ``slot``, that may have got a call whose answer is never seen is replaced.
        """
        try:
            yield
        except Exception as error:  # noqa: BLE001 - raised when all events are handled
            self._failure = self._failure or error
            if slot is not None:
                self._events.append((self.core.unreachable, slot, error))

    # Commands.

    def call(
        self, slot: WorkerSlot, method: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Future[Any]:
        """Call a method of a worker's service."""
        return self._transport.call(slot.peer, method, *args, **kwargs)

    def collect(self, requests: Sequence[RolloutRequest]) -> None:
        for request in requests:
            request.asked_at = clock_ns()
            with self._going_on(request.slot):
                deliver = partial(self._post_collected, request)
                self._transport.collect(request.slot.peer, request.wire_request, deliver)

    def _note_collected(
        self, request: RolloutRequest, offer: Offer, error: BaseException | None
    ) -> None:
        if self.core.closed:
            return
        if error is not None:
            self.core.not_collected(request, error)
            return
        if not request.slot.is_gone:
            self._stats_recorder.collected(offer.header, request.asked_at)
        self.core.offered(request, offer, clock_ns())

    def preempt(self, request: RolloutRequest) -> None:
        with self._going_on():
            self.call(request.slot, WorkerService.preempt, request.number)

    def fetch(self, request: RolloutRequest, offer: Offer) -> None:
        request.asked_at = clock_ns()
        with self._going_on(request.slot):
            offer.fetch(partial(self._post_fetched, request))

    def _note_fetched(
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

    def decline(self, offer: Offer) -> None:
        with self._going_on():
            offer.decline()

    def _then_either(
        self,
        answer: Future[Any],
        answered: Callable[[Any], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        """Post one of these events when a worker's answer is there."""
        # Nothing here refers to ``answer``: only the garbage collector could free that cycle.
        answer.add_done_callback(partial(self._post, self._answered, answered, failed))

    def _answered(
        self,
        answered: Callable[[Any], None],
        failed: Callable[[BaseException], None],
        answer: Future[Any],
    ) -> None:
        if self.core.closed:
            return
        if (error := answer.exception()) is not None:
            failed(error)
        else:
            answered(answer.result())

    def keep(self, request: RolloutRequest, keep_s: float) -> None:
        with self._going_on(request.slot):
            self._then_either(
                self._transport.hand_over(request.slot.peer, request.number, request.key, keep_s),
                partial(self.core.kept, request),
                partial(self.core.not_kept, request),
            )

    def await_taken(self, request: RolloutRequest) -> None:
        with self._going_on(request.slot):
            self._then_either(
                self.call(request.slot, WorkerService.handover_outcome, request.key),
                lambda is_taken: self.core.taken(request, is_taken=is_taken),
                partial(self.core.not_kept, request),
            )

    def take_back(self, request: RolloutRequest) -> None:
        with self._going_on():
            self.call(request.slot, WorkerService.cancel_handover, request.key)

    def set_up(self, slot: WorkerSlot, method: Callable[..., Any], args: Sequence[Any]) -> None:
        with self._going_on(slot):
            self._then_either(
                self.call(slot, method, *args),
                lambda _: self.core.set_up(slot),
                partial(self.core.not_set_up, slot),
            )

    def report_failure(self, slot: WorkerSlot, error: BaseException, *, is_final: bool) -> None:
        with self._going_on():
            if isinstance(error, EnvError) and error.num_env_faults:
                self.core.requests.env_failed(slot, error.num_env_faults)
                self._stats_recorder.env_failed(error.env_faults)
            self._failure_sink.report(slot.worker_id, slot.incarnation, error, is_final=is_final)

    def report_drained(self, slot: WorkerSlot) -> None:
        with self._going_on():
            self._failure_sink.drained(slot.worker_id, slot.incarnation)

    def note_activity(self, activity: Activity) -> None:
        with self._going_on():
            self._stats_recorder.switch_to(activity)

    def deliver(self, wanted: Wanted, requests: Sequence[RolloutRequest]) -> None:
        with self._going_on():
            self._deliver(wanted, requests)

    def wake_user(self) -> None:
        with self._going_on():
            self._wake_user()
