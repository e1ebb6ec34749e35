"""Sends each new worker its plan: a bounded number at one time, and a large part once per host."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from distcollect.common.memory_segment import Segment
from distcollect.engine.pickled_plan import PickledPlan
from distcollect.transport.protocol import Transport
from distcollect.transport.worker_service import WorkerInfo, WorkerService

# A part may hold a copy of the whole policy. A thousand workers may join at one moment.
MAX_ON_THE_WAY = 8
# A worker that shares a part keeps it for as long as it lives, which a small one isn't worth.
SHARED_FROM_BYTES = 1 << 20

_SharedPart: TypeAlias = tuple[str, bytes]  # a host, and a part that its workers share


@dataclass(eq=False)
class _Recipient:
    """A worker, and the parts of its plan that it does not have yet."""

    peer: int
    parts: deque[bytes]
    done: Callable[[Future[WorkerInfo]], None]


class PlanSender:
    """Sends plans to workers, then has them make envs and policy, all workers at the same time.

    Its methods are called on one thread, and ``post`` has that thread call a function.
    """

    def __init__(self, transport: Transport, post: Callable[[Callable[[], None]], None]) -> None:
        """Send by ``transport``; see above for ``post``."""
        self._transport = transport
        self._post = post
        # With the part that this worker is going to share.
        self._waiting: deque[tuple[_Recipient, _SharedPart | None]] = deque()
        self._num_on_the_way = 0
        # Where a part can be read; before that, those who wait for it.
        self._shared: dict[_SharedPart, Segment | list[_Recipient]] = {}

    def send(
        self, peer: int, plan: PickledPlan, done: Callable[[Future[WorkerInfo]], None]
    ) -> None:
        """Have a worker build its plan.

        Args:
            peer: the worker's process.
            plan: what it is to build.
            done: called on any thread with what the worker found, or with the error.
        """
        self._go_on(_Recipient(peer, deque(plan), done))

    def _go_on(self, to: _Recipient) -> None:
        """Have a worker get its next part; if it has all, have it build the plan."""
        if not to.parts:
            self._transport.call(to.peer, WorkerService.configure).add_done_callback(to.done)
            return
        host, part = self._transport.host_key(to.peer), to.parts[0]
        key = None if host is None or len(part) < SHARED_FROM_BYTES else (host, part)
        shared = None if key is None else self._shared.get(key)
        if isinstance(shared, Segment):
            read = self._transport.call(to.peer, WorkerService.read_part, shared)
            self._when_done(read, self._was_read, to, shared)
        elif shared is not None:
            shared.append(to)
        else:
            if key is not None:
                self._shared[key] = []
            self._waiting.append((to, key))
            self._send_next()

    def _send_next(self) -> None:
        while self._waiting and self._num_on_the_way < MAX_ON_THE_WAY:
            self._num_on_the_way += 1
            to, key = self._waiting.popleft()
            sent = self._transport.call(
                to.peer, WorkerService.receive_part, to.parts[0], share=key is not None
            )
            self._when_done(sent, self._arrived, to, key)

    def _when_done(self, answer: Future[Any], function: Callable[..., None], *args: object) -> None:
        answer.add_done_callback(lambda done: self._post(partial(function, *args, done)))

    def _arrived(
        self, to: _Recipient, key: _SharedPart | None, sent: Future[Segment | None]
    ) -> None:
        self._num_on_the_way -= 1
        if key is not None:
            readers = self._shared.pop(key)
            assert isinstance(readers, list)
            if sent.exception() is None and (place := sent.result()) is not None:
                self._shared[key] = place
            for reader in readers:
                self._go_on(reader)
        self._has_part(to, sent)
        self._send_next()

    def _was_read(self, to: _Recipient, place: Segment, read: Future[None]) -> None:
        if read.exception() is None:
            self._has_part(to, read)
            return
        # The worker that shared it has ended, or its memory can't be mapped for another reason.
        self._shared = {key: where for key, where in self._shared.items() if where != place}
        self._waiting.append((to, None))
        self._send_next()

    def _has_part(self, to: _Recipient, got: Future[Any]) -> None:
        if (error := got.exception()) is None:
            to.parts.popleft()
            self._go_on(to)
        else:
            failed: Future[WorkerInfo] = Future()
            failed.set_exception(error)
            to.done(failed)
