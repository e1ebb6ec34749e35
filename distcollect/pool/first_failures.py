"""Notices that replacing workers does not help: all of them fail before their first rollout."""

from __future__ import annotations

import re
from collections.abc import Collection

from distcollect.errors import ArgumentError, WorkerError, WorkerLost
from distcollect.pool.worker_slots import WorkerSlot

# In so many processes in a row of each worker. Fewer may be bad luck.
_TIMES = 3
_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+")  # addresses and pids, which differ


class FirstFailures:
    """By which exceptions processes failed at what they were asked for first."""

    def __init__(self) -> None:
        """Start without failures."""
        self._messages: dict[int, dict[int, str]] = {}  # by worker_id and incarnation
        self._have_collected = False

    def collected(self, worker_id: int) -> None:
        """A worker has collected a rollout."""
        self._have_collected = True
        if self._messages:
            self._messages.pop(worker_id, None)

    def is_final(self, slot: WorkerSlot, error: BaseException, collecting: Collection[int]) -> bool:
        """A process failed; whether all do, so that the run can't go on.

        Args:
            slot: the process.
            error: its exception.
            collecting: the worker_ids of all workers that collect.
        """
        is_permanent = getattr(error, "is_permanent", isinstance(error, ArgumentError))
        if is_permanent and not self._have_collected:
            return True
        if isinstance(error, WorkerLost) or slot.num_requests > 1:
            return False
        message = error.message if isinstance(error, WorkerError) else repr(error)
        message = _NUMBERS.sub("", message)
        self._messages.setdefault(slot.worker_id, {})[slot.incarnation] = message
        return slot.worker_id in collecting and all(
            [*self._messages.get(worker_id, {}).values()][-_TIMES:] == _TIMES * [message]
            for worker_id in collecting
        )
