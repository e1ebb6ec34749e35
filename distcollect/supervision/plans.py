"""Sends each new worker its plan: a bounded number at one time, and a large one once per host."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from distcollect.common.memory_segment import Segment
from distcollect.transport.protocol import Transport
from distcollect.transport.worker_service import Probe, WorkerService

# A plan holds a copy of the whole policy. A thousand workers may join at one moment.
_MAX_ON_THE_WAY = 8
# A worker that shares its plan keeps it for as long as it lives, which a small one isn't worth.
_SHARED_FROM_BYTES = 1 << 20


@dataclass(eq=False)
class _Sending:
    """A worker that waits for its plan, or to which it is on its way."""

    peer: int
    plan: bytes
    done: Callable[[Future[Probe]], None]
    host: str | None  # whose workers share the plan; None: it is for this one alone


@dataclass(eq=False)
class _SharedPlan:
    """A plan in the memory of one worker, where others on its host read it."""

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
        self._shared: dict[tuple[str, bytes], _SharedPlan] = {}  # by host and plan

    def send(self, peer: int, plan: bytes, done: Callable[[Future[Probe]], None]) -> None:
        """Have a worker build its plan.

        Args:
            peer: the worker's process.
            plan: a pickled :class:`~distcollect.engine.plan.WorkerPlan`.
            done: called on any thread with what the worker found, or with the error.
        """
        host = self._transport.host_of(peer) if len(plan) >= _SHARED_FROM_BYTES else None
        sending = _Sending(peer, plan, done, host)
        if host is None:
            self._enqueue(sending)
        elif (shared := self._shared.get((host, plan))) is None:
            self._shared[host, plan] = _SharedPlan()
            self._enqueue(sending)
        elif shared.place is None:
            shared.readers.append(sending)
        else:
            self._read(sending, shared.place)

    def _enqueue(self, sending: _Sending) -> None:
        self._waiting.append(sending)
        self._send_next()

    def _send_next(self) -> None:
        while self._waiting and self._num_on_the_way < _MAX_ON_THE_WAY:
            self._num_on_the_way += 1
            self._begin(self._waiting.popleft())

    def _begin(self, sending: _Sending) -> None:
        share = sending.host is not None
        sent = self._transport.call(
            sending.peer, WorkerService.receive_plan, sending.plan, share=share
        )
        sent.add_done_callback(lambda sent: self._post(partial(self._arrived, sending, sent)))

    def _arrived(self, sending: _Sending, sent: Future[Segment | None]) -> None:
        self._num_on_the_way -= 1
        error = sent.exception()
        if error is None:
            self._configure(sending)
        else:
            failed: Future[Probe] = Future()
            failed.set_exception(error)
            sending.done(failed)
        if sending.host is not None:
            self._share(sending.host, sending.plan, sent)
        self._send_next()

    def _configure(self, sending: _Sending) -> None:
        answer = self._transport.call(sending.peer, WorkerService.configure)
        answer.add_done_callback(sending.done)

    def _share(self, host: str, plan: bytes, sent: Future[Segment | None]) -> None:
        """Let others on this host read the plan, now that a worker there has it, or is lost."""
        shared = self._shared[host, plan]
        readers, shared.readers = shared.readers, []
        if sent.exception() is None and (place := sent.result()) is not None:
            shared.place = place
            for reader in readers:
                self._read(reader, place)
            return
        del self._shared[host, plan]
        for reader in readers:
            self.send(reader.peer, plan, reader.done)

    def _read(self, sending: _Sending, place: Segment) -> None:
        read = self._transport.call(sending.peer, WorkerService.read_plan, place)
        was_read = partial(self._was_read, sending, place)
        read.add_done_callback(lambda read: self._post(partial(was_read, read)))

    def _was_read(self, sending: _Sending, place: Segment, read: Future[None]) -> None:
        if read.exception() is None:
            self._configure(sending)
            return
        # The worker that shared it has ended, or its memory can't be mapped for another reason.
        assert sending.host is not None
        shared = self._shared.get((sending.host, sending.plan))
        if shared is not None and shared.place == place:
            del self._shared[sending.host, sending.plan]
        sending.host = None
        self._enqueue(sending)
