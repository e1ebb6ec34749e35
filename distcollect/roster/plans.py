"""Sends each new worker its plan: to a bounded number at one time, here as shared memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeAlias

import numpy as np
import torch

from distcollect.common.memory_segment import Segment
from distcollect.common.shared_memory import allocate
from distcollect.engine.pickled_plan import PickledPlan
from distcollect.transport.protocol import Transport
from distcollect.transport.worker_service import WorkerInfo, WorkerService

# Each may hold a copy of the whole policy. A thousand workers may join at one moment.
MAX_ON_THE_WAY = 8
# A worker on this host maps a part from this size on.
SHARED_FROM_BYTES = 1 << 20

_Shared: TypeAlias = tuple[bytes, torch.Tensor, Segment]  # a part, and where it is


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
        self._shared: _Shared | None = None

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
            parts: list[bytes | Segment] = [*plan]
            shared = self._share(peer, plan[0])
            if shared is not None:
                parts[0] = shared[-1]
            sent = self._transport.call(peer, WorkerService.receive_plan, parts)
            sent.add_done_callback(partial(self._answered, peer, done, shared))

    def _share(self, peer: int, part: bytes) -> _Shared | None:
        """Return memory with this part, common to workers on this host; None: send it."""
        if len(part) < SHARED_FROM_BYTES or not self._transport.shares_memory(peer):
            return None
        if self._shared is None or self._shared[0] is not part:
            memory, place = allocate(len(part))
            memory.numpy()[:] = np.frombuffer(part, np.uint8)
            self._shared = part, memory, place
        return self._shared

    def _answered(
        self,
        peer: int,
        done: Callable[[Future[WorkerInfo]], None],
        _kept: _Shared | None,  # until the worker has mapped it
        sent: Future[None],
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
        if not self._num_on_the_way:
            self._shared = None
