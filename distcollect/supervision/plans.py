"""Sends each new worker its plan, a bounded number at one time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from distcollect.transport.protocol import Transport
from distcollect.transport.worker_service import Probe, WorkerService

# A plan holds a copy of the whole policy. A thousand workers may join at one moment.
_MAX_ON_THE_WAY = 8


@dataclass(eq=False)
class _Sending:
    """A worker that waits for its plan, or to which it is on its way."""

    peer: int
    plan: bytes
    done: Callable[[Future[Probe]], None]


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

    def send(self, peer: int, plan: bytes, done: Callable[[Future[Probe]], None]) -> None:
        """Have a worker build its plan.

        Args:
            peer: the worker's process.
            plan: a pickled :class:`~distcollect.engine.plan.WorkerPlan`.
            done: called on any thread with what the worker found, or with the error.
        """
        self._waiting.append(_Sending(peer, plan, done))
        self._send_next()

    def _send_next(self) -> None:
        while self._waiting and self._num_on_the_way < _MAX_ON_THE_WAY:
            self._num_on_the_way += 1
            self._begin(self._waiting.popleft())

    def _begin(self, sending: _Sending) -> None:
        sent = self._transport.call(sending.peer, WorkerService.receive_plan, sending.plan)
        sending.plan = b""
        sent.add_done_callback(lambda sent: self._post(partial(self._arrived, sending, sent)))

    def _arrived(self, sending: _Sending, sent: Future[None]) -> None:
        self._num_on_the_way -= 1
        error = sent.exception()
        if error is None:
            answer = self._transport.call(sending.peer, WorkerService.configure)
            answer.add_done_callback(sending.done)
        else:
            failed: Future[Probe] = Future()
            failed.set_exception(error)
            sending.done(failed)
        self._send_next()
