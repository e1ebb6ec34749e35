"""Handles the events of the pool one at a time, and executes what its core commands."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from distcollect.common.clock import clock_ns
from distcollect.common.replies import Reply
from distcollect.errors import EnvError
from distcollect.pool.pool_commands import (
    AwaitTaken,
    Collect,
    Command,
    Decline,
    Deliver,
    Fetch,
    Keep,
    NoteActivity,
    Preempt,
    ReportDrained,
    ReportFailure,
    SetUp,
    TakeBack,
    WakeUser,
)
from distcollect.pool.pool_core import PoolCore
from distcollect.pool.worker_slots import RolloutRequest, WorkerSlot
from distcollect.rollout.layout import Tensors
from distcollect.roster.interfaces import FailureSink
from distcollect.telemetry.recorder import StatsRecorder
from distcollect.transport.pending_answers import PendingAnswer
from distcollect.transport.protocol import Offer, Transport
from distcollect.transport.worker_service import WorkerService

T = TypeVar("T")


class EventLoop:
    """The pool's only lock, the queue of its events, and the execution of commands.

    Attributes:
        lock: protects the core. It is reentrant, as an answer may come before the call that asks
            for it returns; no event enters the core while the core handles another.
    """

    def __init__(
        self,
        core: PoolCore,
        transport: Transport,
        failure_sink: FailureSink,
        stats_recorder: StatsRecorder,
        *,
        deliver: Callable[[Deliver], None],
        wake_user: Callable[[], None],
    ) -> None:
        """Start without events.

        Args:
            core: decides what is done.
            transport: see :class:`~.pool.Pool`, as for the next two.
            failure_sink: is told of workers.
            stats_recorder: what to count in.
            deliver: gives the user a batch.
            wake_user: wakes the user's threads that wait for anything else.
        """
        self.lock = threading.RLock()
        self._is_draining = False
        self._core = core
        self._transport = transport
        self._failure_sink = failure_sink
        self._stats_recorder = stats_recorder
        self._events: deque[tuple[Any, ...]] = deque()  # see post()
        # Bound once: of each, one for each open rollout would be much to do for garbage collection.
        self._post = self.post
        self._post_collected = partial(self.post, self._note_collected)
        self._post_fetched = partial(self.post, self._note_fetched)
        self._executors: dict[type[Command], Callable[[Any], object]] = {
            Collect: self._collect,
            Preempt: lambda it: self.call(
                it.request.slot, WorkerService.preempt, it.request.number
            ),
            Fetch: self._fetch,
            Decline: lambda it: it.offer.decline(),
            Keep: self._keep,
            AwaitTaken: self._await_taken,
            TakeBack: lambda it: self.call(
                it.request.slot, WorkerService.cancel_handover, it.request.key
            ),
            SetUp: self._set_up,
            ReportFailure: self._report_failure,
            ReportDrained: self._report_drained,
            NoteActivity: lambda it: stats_recorder.switch_to(it.activity),
            Deliver: deliver,
            WakeUser: lambda _: wake_user(),
        }

    def post(self, *event: Any) -> None:
        """Have the core handle an event, after those that came before.

        If another thread handles events now, it handles this one too. A thread that holds the lock
        finds it handled when this returns.

        Args:
            event: a function and its arguments; one tuple, as many events may wait.
        """
        self._events.append(event)
        # Else the thread that drains sees the event: it looks once more after it has ended.
        if not self._is_draining:
            with self.lock:
                self._drain()

    def do(self, event: Callable[..., T], *args: Any) -> T:
        """Have the core handle an event of the user's thread now; return what that returns."""
        with self.lock:
            try:
                return event(*args)
            finally:
                self._drain()

    def _drain(self) -> None:
        """Execute all commands and handle all events, one after the other.

        A transport may answer before its method returns: that answer is an event like any other,
        and is handled when the commands before it are executed. But a rollout that comes with its
        offer is handled at once.
        """
        commands, events = self._core.commands, self._events
        failure: Exception | None = None
        while (commands or events) and not self._is_draining:
            self._is_draining = True
            try:
                while commands or events:
                    command = commands.popleft() if commands else None
                    try:
                        if command is not None:
                            self._executors[type(command)](command)
                        else:
                            event = events.popleft()
                            event[0](*event[1:])
                    except Exception as error:  # noqa: BLE001 - raised below, after all else
                        failure = failure or error
                        self._not_executed(command, error)
            finally:
                self._is_draining = False
        if failure is not None:
            raise failure

    def _not_executed(self, command: Command | None, error: Exception) -> None:
        """Have a worker replaced that may have got a call, and whose answer may never be seen."""
        slot = command.slot if isinstance(command, SetUp) else None
        if isinstance(command, Fetch | Keep | AwaitTaken):
            slot = command.request.slot
        if slot is not None:
            self._events.append((self._core.unreachable, slot, error))

    def call(
        self, slot: WorkerSlot, method: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Future[Any]:
        """Call a method of a worker's service."""
        return self._transport.call(slot.peer, method, *args, **kwargs)

    def _collect(self, command: Collect) -> None:
        failure: Exception | None = None
        for request in command.requests:
            request.asked_at = clock_ns()
            try:
                answer = self._transport.collect(request.slot.peer, request.wire_request)
                _then(answer, self._post_collected, request)
            except Exception as error:  # noqa: BLE001 - raised below, after the other requests
                failure = failure or error
                self._events.append((self._core.unreachable, request.slot, error))
        if failure is not None:
            raise failure

    def _note_collected(self, request: RolloutRequest, answer: Reply[Offer]) -> None:
        if self._core.closed:
            return
        if (error := answer.exception()) is not None:
            self._core.not_collected(request, error)
            return
        offer = answer.result()
        if not request.slot.is_gone:
            self._stats_recorder.collected(offer.header, request.asked_at)
        self._core.offered(request, offer, clock_ns())

    def _fetch(self, command: Fetch) -> None:
        command.began_at = clock_ns()
        answer = command.offer.fetch()
        if isinstance(answer, Reply) and answer.done():
            # It came with its offer. The core handles no event now, so this one need not wait.
            self._note_fetched(command, answer)
        else:
            _then(answer, self._post_fetched, command)

    def _note_fetched(self, command: Fetch, answer: Reply[Tensors]) -> None:
        if self._core.closed:
            return
        request = command.request
        if (error := answer.exception()) is not None:
            self._core.not_fetched(request, error)
            return
        header, took_ns = command.offer.header, clock_ns() - command.began_at
        self._stats_recorder.fetched(header.worker_id, header.num_bytes, took_ns)
        self._core.fetched(request, answer.result())

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
        if self._core.closed:
            return
        if (error := answer.exception()) is not None:
            failed(error)
        else:
            answered(answer.result())

    def _keep(self, command: Keep) -> None:
        request = command.request
        answer = self._transport.hand_over(
            request.slot.peer, request.number, request.key, command.keep_s
        )
        self._then_either(
            answer,
            partial(self._core.kept, request),
            partial(self._core.not_kept, request),
        )

    def _await_taken(self, command: AwaitTaken) -> None:
        request = command.request
        self._then_either(
            self.call(request.slot, WorkerService.handover_outcome, request.key),
            lambda is_taken: self._core.taken(request, is_taken=is_taken),
            partial(self._core.not_kept, request),
        )

    def _set_up(self, command: SetUp) -> None:
        self._then_either(
            self.call(command.slot, command.method, *command.args),
            lambda _: self._core.set_up(command.slot),
            partial(self._core.not_set_up, command.slot),
        )

    def _report_failure(self, command: ReportFailure) -> None:
        slot, error = command.slot, command.error
        if isinstance(error, EnvError) and error.num_env_faults:
            self._core.requests.env_failed(slot, error.num_env_faults)
            self._stats_recorder.env_failed(slot.worker_id, slot.incarnation, error)
        self._failure_sink.report(
            slot.worker_id, slot.incarnation, error, is_final=command.is_final
        )

    def _report_drained(self, command: ReportDrained) -> None:
        self._failure_sink.drained(command.slot.worker_id, command.slot.incarnation)


def _then(answer: PendingAnswer, callback: Callable[[Any, Any], None], about: object) -> None:
    """Have ``callback`` called with ``about`` and the answer, once it is there.

    Almost nothing is made here, as this is done for each rollout. Nothing that the answer refers to
    refers to it: that would be a cycle, which only the garbage collector could free.
    """
    if isinstance(answer, Reply):
        answer.then(callback, about)
    else:
        answer.add_done_callback(partial(callback, about))
