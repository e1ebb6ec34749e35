"""The batches on their way to the user."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from distcollect.common.clock import clock_ns
from distcollect.common.replies import WAKEUP_INTERVAL_S, Reply
from distcollect.errors import BatchTimeout
from distcollect.launch.preemption import exit_if_requested
from distcollect.pool.event_loop import EventLoop
from distcollect.pool.pool_commands import Deliver, Wanted
from distcollect.pool.pool_core import PoolCore
from distcollect.pool.requests import origin
from distcollect.pool.worker_slots import BatchPlan, RolloutRequest
from distcollect.rollout.header import Rollout
from distcollect.telemetry.recorder import StatsRecorder

# Of a delivery: its number; of each rollout the worker_id, and pairs (lag, frames); how many frames
# are masked, by worker_id; when it was, in nanoseconds.
_Delivered: TypeAlias = tuple[
    int, Sequence[int], Sequence[Sequence[tuple[int, int]]], Mapping[int, int], int
]


@dataclass(eq=False)
class Delivery:
    """The rollouts of a batch on their way to the user.

    They are the user's once the user's thread *claims* them by this number, which it passes to the
    next call. A delivery that was not claimed, as an exception interrupted the user's thread, is
    given to it again, or is given up if it has become too old.

    Attributes:
        number: counts the deliveries of a pool, from 1.
        wanted: what the user asked for.
        requests: of the rollouts.
        rollouts: the rollouts, in the order of their workers' ids; empty for a reference.
    """

    number: int
    wanted: Wanted
    requests: list[RolloutRequest]
    rollouts: list[Rollout]


class Deliveries:
    """Gives batches to the user's thread, one at a time, and each until it is claimed."""

    def __init__(
        self,
        plan: BatchPlan,
        core: PoolCore,
        loop: EventLoop,
        stats_recorder: StatsRecorder,
        ended_by: Callable[[], BaseException | None],
    ) -> None:
        """Start without a batch.

        Args:
            plan: what is to be collected.
            core: says when a batch is there.
            loop: handles what the user's thread hands over.
            stats_recorder: what to count in.
            ended_by: gives the error that ended the run; None if none did.
        """
        self._plan = plan
        self._core = core
        self._loop = loop
        self._stats_recorder = stats_recorder
        self._ended_by = ended_by
        self._num_deliveries = 0
        self._num_counted = 0  # in the statistics
        self._uncounted: deque[_Delivered] = deque()  # deliveries that are not counted there yet
        self._last: Delivery | None = None  # unless it is known to be claimed
        self._reply: Reply[Delivery] | None = None  # the user's thread waits for it

    def get(self, timeout_s: float, claimed: int = 0) -> Delivery:
        """Wait for the rollouts of the next batch.

        In sync mode they are fresh, one of every worker. A worker collects once it has the newest
        weights that were sent to it. The share of one that is missing falls to the others. In async
        mode it is the next rollout of whichever worker; all go on collecting meanwhile.

        Args:
            timeout_s: seconds to wait.
            claimed: number of the last delivery that the user has. If there was one after it, that
                is delivered again, unless it has become too old.

        Raises:
            BatchTimeout: not all within ``timeout_s``; names the workers waited for.
            DistCollectError: the run can't go on.
        """
        if self._plan.sync:
            deadline_s = self._plan.deadline_s
            return self._gather(Wanted.ALL, timeout_s, claimed, deadline_s=deadline_s)
        return self._gather(Wanted.NEXT, timeout_s, claimed)

    def hand_over(self, timeout_s: float, keep_s: float, claimed: int = 0) -> Delivery:
        """The next rollout of whichever worker, for another trainer to take; async mode only.

        Its worker keeps it for ``keep_s``. It counts as delivered once it was taken, else as lost:
        by "not_taken", "worker_lost" or "shut_down". If the only rollouts are some that were
        fetched for :meth:`get`, it is one of these, and delivered.

        Returns:
            The one request. Its ``key`` opens the rollout on its worker; if it was fetched before,
            its ``rollout`` is here.

        Raises: as :meth:`get`.
        """
        return self._gather(Wanted.REFERENCE, timeout_s, claimed, keep_s=keep_s)

    def claim(self, number: int) -> None:
        """The user has all deliveries up to this number."""
        self._loop.ask(self._settle_last, number)

    def forget(self, number: int) -> None:
        """The user has, or is about to get, a batch made of this delivery's rollouts."""
        delivery = self._last
        if delivery is not None and delivery.number == number:
            delivery.rollouts = []

    def note(
        self,
        number: int,
        worker_ids: Sequence[int],
        lags: Sequence[Sequence[tuple[int, int]]],
        masked: Mapping[int, int],
    ) -> None:
        """Count a delivery in the statistics, once: at the latest when :attr:`ledger` is read.

        Args:
            number: the delivery's.
            worker_ids: of each rollout, its worker's.
            lags: of each rollout, pairs (lag, frames).
            masked: maps a worker_id to how many of its frames are masked as too stale.
        """
        # The pool's thread counts it with the next call: waking it only for this takes time.
        self._uncounted.append((number, worker_ids, lags, masked, clock_ns()))

    def _gather(
        self,
        wanted: Wanted,
        timeout_s: float,
        claimed: int,
        *,
        keep_s: float = 0.0,
        deadline_s: float | None = None,
    ) -> Delivery:
        """Wait for a batch; after ``deadline_s`` take what the workers have by then."""
        exit_if_requested()
        self._check()
        end = time.monotonic() + timeout_s
        try:
            reply = self._loop.begin(self._want, wanted, keep_s, claimed)
            if deadline_s is not None and deadline_s < timeout_s:
                early_end = end - timeout_s + deadline_s
                if not self._arrives(reply, early_end):
                    self._loop.do(self._core.end_early)
            delivery = reply.result() if self._arrives(reply, end) else None
        except BaseException:  # Ctrl-C as well
            self._loop.ask(self._cancel)
            raise
        awaited = ""
        if delivery is None:
            delivery, awaited = self._loop.do(self._cancel)  # it may have come by now
        if delivery is None:
            raise BatchTimeout(
                f"no batch within {timeout_s:g} s; waited for {awaited}. "
                "Faults(batch_timeout_s=...) gives them longer"
            )
        self._stats_recorder.switch_to("assemble")
        return delivery

    def _arrives(self, reply: Reply[Delivery], deadline: float) -> bool:
        """Wait until the batch is there; whether it is at the deadline."""
        while not reply.arrives(min(deadline - time.monotonic(), WAKEUP_INTERVAL_S)):
            exit_if_requested()
            self._check()
            if time.monotonic() >= deadline:
                return False
        return True

    def _check(self) -> None:
        if (error := self._ended_by()) is not None:
            raise error

    @property
    def on_their_way(self) -> Sequence[RolloutRequest]:
        """What was delivered, and is not claimed yet as far as is known."""
        return () if self._last is None else self._last.requests

    # What the event loop does for the user's thread.

    def _want(self, reply: Reply[Delivery], wanted: Wanted, keep_s: float, claimed: int) -> None:
        """The user wants a batch; ``reply`` gets it when it is there."""
        self._check()
        self.count()
        if self._core.wanted is not None:
            self._core.batch_cancelled()  # an exception ended the wait for it
        self._settle_last(claimed)
        if self._last is not None:
            is_here = bool(self._last.rollouts) or wanted is Wanted.REFERENCE
            if is_here and self._core.may_deliver_again(self._last.requests, wanted):
                reply.set_result(self._last)
                return
            self.take_back("given_up")
        if wanted is not Wanted.REFERENCE:
            self._stats_recorder.batch_requested(self._core.requests.num_waiting)
        self._reply = reply
        self._core.batch_wanted(wanted, keep_s)

    def deliver(self, command: Deliver) -> None:
        """What the user waits for is there."""
        rollouts = []
        if command.wanted is not Wanted.REFERENCE:
            taken = [request.take_rollout() for request in command.requests]
            rollouts = sorted(taken, key=lambda rollout: origin(rollout.header))
        self._num_deliveries += 1
        self._last = Delivery(self._num_deliveries, command.wanted, command.requests, rollouts)
        reply, self._reply = self._reply, None
        if reply is not None:
            reply.set_result(self._last)

    def end(self) -> None:
        """The run can't go on: the user's thread waits no longer."""
        reply, self._reply = self._reply, None
        error = self._ended_by()
        if reply is not None and error is not None:
            reply.set_exception(error)

    def _cancel(self) -> tuple[Delivery | None, str]:
        """The user waits no longer.

        Returns:
            The batch if it came meanwhile, and which workers it waited for, in words.
        """
        was_waiting, awaited = self._core.wanted is not None, self._core.awaited
        self._core.batch_cancelled()
        self._reply = None
        return None if was_waiting else self._last, awaited

    def _settle_last(self, claimed: int) -> None:
        if self._last is not None and claimed >= self._last.number:
            self._last = None

    def take_back(self, cause: str) -> None:
        """The user does not get the last delivery; it is lost by ``cause``."""
        if self._last is not None:
            self._core.take_back(self._last.requests, cause)
            self._last = None

    def count(self) -> None:
        """Count what was delivered since the last call."""
        while self._uncounted:
            number, worker_ids, lags, masked, at = self._uncounted.popleft()
            if number <= self._num_counted:
                continue
            self._num_counted = number
            self._stats_recorder.delivered(zip(worker_ids, lags, strict=True), at)
            for worker_id, num_frames in masked.items():
                self._core.requests.stale_frames[worker_id] += num_frames
