"""The pool's lock, and the user's thread that waits for a batch to come together under it."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from distcollect.common.threads import LOOK_UP_S
from distcollect.errors import BatchTimeout, CollectorStateError
from distcollect.launch.preemption import exit_if_requested
from distcollect.telemetry.recorder import Activity, StatsRecorder
from distcollect.trainer.requests import Requests
from distcollect.trainer.scheduler import Scheduler
from distcollect.trainer.worker_slots import WorkerSlots

T = TypeVar("T")


class PoolWait:
    """Who waits is woken when something has changed, and by what ends the run.

    Attributes:
        lock: to be held for all the rest. It is reentrant: an answer that is there at once is dealt
            with on the thread that asked.
        changed: to be notified when something has.
        closed: nothing is waited for any more.
    """

    def __init__(
        self,
        slots: WorkerSlots,
        scheduler: Scheduler,
        requests: Requests,
        stats_recorder: StatsRecorder,
        *,
        sync: bool,
    ) -> None:
        """Nobody waits yet; for the arguments see :class:`~.pool.Pool`, which makes them."""
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.closed = False
        self._failed: BaseException | None = None
        self._slots = slots
        self._scheduler = scheduler
        self._requests = requests
        self._stats_recorder = stats_recorder
        self._sync = sync

    def fail(self, error: BaseException) -> None:
        """What :meth:`check` raises from now on. The first error counts."""
        if self._failed is None:
            self._failed = error
        self.changed.notify_all()

    def close(self) -> None:
        """As :meth:`fail`, for good."""
        self.closed = True
        self.changed.notify_all()

    @property
    def is_over(self) -> bool:
        """Whether :meth:`check` raises."""
        return self.closed or self._failed is not None

    def check(self) -> None:
        """Raise what ended the run, if anything did."""
        if self.closed:
            raise CollectorStateError("the collector was shut down")
        if self._failed is not None:
            # A copy: what was raised refers to those it passed, and so to the collector.
            raise copy.copy(self._failed) from self._failed.__cause__

    def wait(self, ready: Callable[[], T | None], timeout_s: float) -> T:
        """As :meth:`wait_for`, but it has to come in time.

        Raises:
            BatchTimeout: it doesn't; names those waited for.
        """
        result = self.wait_for(ready, timeout_s)
        if not result:
            raise BatchTimeout(
                f"no batch within {timeout_s:g} s; waited for {self._awaited()}. "
                "Faults(batch_timeout_s=...) gives them longer"
            )
        return result

    def wait_for(self, ready: Callable[[], T | None], timeout_s: float) -> T | None:
        """Wait until ``ready`` gives something, and give it; None if it doesn't in time.

        Raises: what :meth:`check` does.
        """
        deadline = time.monotonic() + timeout_s
        while not (result := ready()):
            exit_if_requested()
            self.check()
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return None
            self._stats_recorder.switch_to(self._activity())
            self.changed.wait(min(remaining, LOOK_UP_S))
        self._stats_recorder.switch_to("assemble")
        return result

    def _activity(self) -> Activity:
        """What stands between the user's thread and its batch."""
        collecting = any(slot.collecting for slot in self._slots)
        fetching = any(request.fetching for request in self._requests.arrived)
        # In async mode the first that arrives will do.
        if fetching and not (self._sync and collecting):
            return "transfer"
        slots = self._slots.collecting()
        is_up_to_date = self._scheduler.is_up_to_date
        if collecting or not slots or all(is_up_to_date(slot.worker_id) for slot in slots):
            return "collect"
        return "weights"

    def _awaited(self) -> str:
        """Whom we wait for, in words."""
        slots = sorted(self._slots.collecting(), key=lambda slot: slot.worker_id)
        late = [slot.worker_id for slot in slots if slot.unsettled]
        behind = [
            slot.worker_id
            for slot in slots
            if not slot.unsettled and not self._scheduler.is_up_to_date(slot.worker_id)
        ]
        coming = sorted(self._slots.coming)
        parts = []
        if late or not (behind or coming):
            parts.append(f"workers {late}")
        if behind and (self._sync or not late):
            parts.append(f"workers {behind} to acknowledge the newest weights sent to them")
        if kept := self._requests.kept:
            parts.append(f"other trainers to take {len(kept)} rollout(s)")
        if coming:
            parts.append(f"workers {coming} to be replaced")
        return " and for ".join(parts)
