"""Sends each new worker its plan, to a bounded number of workers at one time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from distcollect.engine.pickled_plan import PickledPlan
from distcollect.transport.protocol import Transport
from distcollect.transport.worker_service import WorkerInfo, WorkerService

# Each may hold a copy of the whole policy. A thousand workers may join at one moment.
MAX_ON_THE_WAY = 8


class PlanSender:
    """Sends plans to workers, then has them make envs and policy, all workers at the same time.

    Its methods are called on one thread, and ``post`` has that thread call a function.
    """

    def __init__(self, transport: Transport, post: Callable[[Callable[[], None]], None]) -> None:
        """Send by ``transport``; see above for ``post``."""
        self._transport = transport
        self._post = post
        self._waiting = deque[tuple[int, PickledPlan, Callable[[Future[WorkerInfo]], None]]]()
        self._num_on_the_way = 0

    def send(
        self, peer: int, plan: PickledPlan, done: Callable[[Future[WorkerInfo]], None]
    ) -> None:
        """Have a worker build its plan.

        Args:
            peer: the worker's process.
            plan: what it is to build.
            done: called on any thread with what the worker found, or with the error.
        """
        self._waiting.append((peer, plan, done))
        self._send_next()

    def _send_next(self) -> None:
        while self._waiting and self._num_on_the_way < MAX_ON_THE_WAY:
            self._num_on_the_way += 1
            peer, plan, done = self._waiting.popleft()
            sent = self._transport.call(peer, WorkerService.receive_plan, plan)
            sent.add_done_callback(partial(self._answered, peer, done))

    def _answered(
        self, peer: int, done: Callable[[Future[WorkerInfo]], None], sent: Future[None]
    ) -> None:
        self._post(partial(self._arrived, peer, done, sent))

    def _arrived(
        self, peer: int, done: Callable[[Future[WorkerInfo]], None], sent: Future[None]
    ) -> None:
        self._num_on_the_way -= 1
        if (error := sent.exception()) is None:
            self._transport.call(peer, WorkerService.configure).add_done_callback(done)
        else:
            failed: Future[WorkerInfo] = Future()
            failed.set_exception(error)
            done(failed)
        self._send_next()
