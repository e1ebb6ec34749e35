"""Sends each new worker its plan: a bounded number at one time, and a large part once per host."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from distcollect.common.memory_segment import Segment
from distcollect.engine.pickled_plan import PickledPlan
from distcollect.transport.protocol import Transport
from distcollect.transport.worker_service import WorkerInfo, WorkerService

# A part may hold a copy of the whole policy. A thousand workers may join at one moment.
_MAX_ON_THE_WAY = 8
# A worker that shares a part keeps it for as long as it lives, which a small one isn't worth.
_SHARED_FROM_BYTES = 1 << 20

_Key: TypeAlias = tuple[str, bytes]  # a host and a part


@dataclass(eq=False)
class _Sending:
    """A worker that does not have all of its plan yet."""

    peer: int
    parts: deque[bytes]  # that it does not have
    done: Callable[[Future[WorkerInfo]], None]
    shares: _Key | None = None  # the next part, if it is to share that


@dataclass(eq=False)
class _SharedPart:
    """A part in the memory of one worker, where others on its host read it."""

    place: Segment | None = None  # None: it is on its way there
    readers: list[_Sending] = field(default_factory=list)  # they wait until it is there


class PlanSender:
    """Sends plans to workers, then has them make envs and policy, all workers at the same time.

    Its methods are called on one thread, and ``post`` has that thread call a function.
    """

    def __init__(self, transport: Transport, post: Callable[[Callable[[], None]], None]) -> None:
        """Send by ``transport``; see above for ``post``."""
        self._transport = transport
        self._post = post
        self._waiting: deque[_Sending] = deque()
        self._num_on_the_way = 0
        self._shared: dict[_Key, _SharedPart] = {}

    def send(
        self, peer: int, plan: PickledPlan, done: Callable[[Future[WorkerInfo]], None]
    ) -> None:
        """Have a worker build its plan.

        Args:
            peer: the worker's process.
            plan: what it is to build.
            done: called on any thread with what the worker found, or with the error.
        """
        self._send_part(_Sending(peer, deque(plan), done))

    def _send_part(self, sending: _Sending) -> None:
        """Have a worker get its next part; if it has all, have it build the plan."""
        if not sending.parts:
            answer = self._transport.call(sending.peer, WorkerService.configure)
            answer.add_done_callback(sending.done)
            return
        key = self._key_of(sending)
        if key is None:
            self._enqueue(sending)
        elif (shared := self._shared.get(key)) is None:
            self._shared[key] = _SharedPart()
            sending.shares = key
            self._enqueue(sending)
        elif shared.place is None:
            shared.readers.append(sending)
        else:
            self._read(sending, shared.place)

    def _key_of(self, sending: _Sending) -> _Key | None:
        """Of the next part among those that are shared; None: it is not shared."""
        part = sending.parts[0]
        host = self._transport.host_key(sending.peer)
        return None if host is None or len(part) < _SHARED_FROM_BYTES else (host, part)

    def _enqueue(self, sending: _Sending) -> None:
        self._waiting.append(sending)
        self._send_next()

    def _send_next(self) -> None:
        while self._waiting and self._num_on_the_way < _MAX_ON_THE_WAY:
            self._num_on_the_way += 1
            self._begin(self._waiting.popleft())

    def _begin(self, sending: _Sending) -> None:
        part, shares = sending.parts[0], sending.shares is not None
        sent = self._transport.call(sending.peer, WorkerService.receive_part, part, share=shares)
        sent.add_done_callback(lambda sent: self._post(partial(self._arrived, sending, sent)))

    def _arrived(self, sending: _Sending, sent: Future[Segment | None]) -> None:
        self._num_on_the_way -= 1
        error = sent.exception()
        if sending.shares is not None:
            self._share(sending.shares, None if error else sent.result())
            sending.shares = None
        if error is None:
            sending.parts.popleft()
            self._send_part(sending)
        else:
            failed: Future[WorkerInfo] = Future()
            failed.set_exception(error)
            sending.done(failed)
        self._send_next()

    def _share(self, key: _Key, place: Segment | None) -> None:
        """Let others on a host read a part that is now at ``place``; None: that failed."""
        shared = self._shared.pop(key)
        if place is not None:
            self._shared[key] = _SharedPart(place)
        for reader in shared.readers:
            self._send_part(reader)

    def _read(self, sending: _Sending, place: Segment) -> None:
        read = self._transport.call(sending.peer, WorkerService.read_part, place)
        was_read = partial(self._was_read, sending, place)
        read.add_done_callback(lambda read: self._post(partial(was_read, read)))

    def _was_read(self, sending: _Sending, place: Segment, read: Future[None]) -> None:
        if read.exception() is None:
            sending.parts.popleft()
            self._send_part(sending)
            return
        # The worker that shared it has ended, or its memory can't be mapped for another reason.
        self._shared = {key: part for key, part in self._shared.items() if part.place != place}
        self._enqueue(sending)
