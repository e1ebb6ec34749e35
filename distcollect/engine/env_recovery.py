"""Replaces envs that raised with new ones, up to a number of faults in a row."""

from __future__ import annotations

import logging
import math
import socket
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from distcollect.common.backoff import backoff_s
from distcollect.common.seeding import Stream, env_seed
from distcollect.common.signals import Wakeup
from distcollect.common.step_counter import StepCounter
from distcollect.common.tables import counted
from distcollect.engine.interrupts import Stopped
from distcollect.envs.base import Envs, Fault
from distcollect.errors import EnvError
from distcollect.results import EnvFault

log = logging.getLogger(__name__)

# An env that makes this many steps without a fault has recovered.
_RECOVERED_AFTER_STEPS = 1000
_FIRST_DELAY_S = 0.1
_LONGEST_DELAY_S = 5.0
_MOST_WARNINGS = 5  # of a worker, in so many seconds
_WARNINGS_S = 30.0


def taken_faults(counter: StepCounter, worker_id: int, incarnation: int) -> tuple[EnvFault, ...]:
    """The newest faults that ``counter`` has counted since the last call, at most twenty."""
    host = socket.gethostname()
    return tuple(
        EnvFault(worker_id, incarnation, host, time_s, message)
        for time_s, message in counter.take_faults()
    )


@dataclass
class _Streak:
    """Faults of an env in a row, with no whole episode in between."""

    num_faults: int = 0
    at_step: int = 0  # step of its rows at which the last fault came


class EnvRecovery:
    """Makes new envs for those that raised, each up to ``max_faults`` times in a row.

    Attributes:
        streaks: the envs that raised recently, by their rows. While it is empty,
            :meth:`episodes_ended` need not be called.
    """

    def __init__(self, envs: Envs, counter: StepCounter, max_faults: int) -> None:
        """Replace envs of ``envs``; count faults in ``counter``."""
        self.streaks: dict[tuple[int, ...], _Streak] = {}
        self._envs = envs
        self._counter = counter
        self._max_faults = max_faults
        self._seeds: Sequence[int] | None = None
        self._num_rebuilt = [0] * envs.num_envs  # by row, since the last seed()
        self._is_stopped = False
        self._wakeup = Wakeup()
        self._num_warnings = 0  # since the time that follows
        self._warned_since = -math.inf

    def seed(self, seeds: Sequence[int]) -> None:
        """Derive the seeds of new envs from ``seeds``, one for each row."""
        self._seeds = list(seeds)
        self._num_rebuilt = [0] * len(self._seeds)

    def stop(self) -> None:
        """Make the running or next :meth:`rebuild` raise :class:`Stopped`. From any thread."""
        self._is_stopped = True
        self._wakeup.ring()

    def episodes_ended(self, rows: Iterable[int]) -> None:
        """Whole episodes ended in ``rows``, so the envs of these rows work."""
        for row in rows:
            for env_rows in [each for each in self.streaks if row in each]:
                del self.streaks[env_rows]

    def rebuild_all(self, faults: Sequence[Fault]) -> None:
        """Make new envs in place of all that raised in a call; see :meth:`rebuild`."""
        for fault in faults:
            self.rebuild(fault)

    def rebuild(self, fault: Fault) -> None:
        """Make a new env in place of the one that raised, and reset it.

        If that fails, try again after a pause; pauses double.

        Raises:
            EnvError: the env cannot be made again, failed too often in a row, or is permanent.
            Stopped: see :meth:`stop`.
        """
        error = fault.error
        while True:
            self._counter.env_raised(error.message)
            num_faults = self._count_fault(fault.rows)
            can_rebuild = self._envs.can_rebuild(fault.rows[0]) and not error.is_permanent
            if num_faults > self._max_faults or not can_rebuild:
                raise _final_error(error, num_faults - 1)
            self._warn(error.message, num_faults)
            # No pause before the first attempt, then 0.1 s, 0.2 s, 0.4 s and so on.
            delay_s = backoff_s(num_faults, _FIRST_DELAY_S, _LONGEST_DELAY_S)
            if self._wakeup.wait_until(lambda: self._is_stopped, delay_s):
                raise Stopped
            try:
                self._envs.rebuild(fault.rows, self._new_seeds(fault.rows))
            except EnvError as another:
                error = another
            else:
                _release(fault.error)
                return

    def _warn(self, message: str, num_faults: int) -> None:
        """Log a fault; of many at a time only the first ones, and then how many there were."""
        unsaid, now = "", time.monotonic()
        if now - self._warned_since > _WARNINGS_S:
            if self._num_warnings > _MOST_WARNINGS:
                unsaid = f" (not logged: {counted(self._num_warnings - _MOST_WARNINGS, 'fault')})"
            self._num_warnings, self._warned_since = 0, now
        self._num_warnings += 1
        if self._num_warnings <= _MOST_WARNINGS:
            log.warning("%s; replaced by a new env, %d in a row%s", message, num_faults, unsaid)

    def _count_fault(self, rows: tuple[int, ...]) -> int:
        """Count a fault of the env of ``rows``; its faults in a row."""
        streak = self.streaks.setdefault(rows, _Streak())
        step = self._counter.stepped // self._envs.num_envs
        if step - streak.at_step >= _RECOVERED_AFTER_STEPS:
            streak.num_faults = 0
        streak.num_faults += 1
        streak.at_step = step
        return streak.num_faults

    def _new_seeds(self, rows: Sequence[int]) -> list[int] | None:
        if self._seeds is None:
            return None
        seeds = []
        for row in rows:
            self._num_rebuilt[row] += 1
            seeds.append(env_seed(self._seeds[row], self._num_rebuilt[row], Stream.REBUILT))
        return seeds


def _release(error: BaseException | None) -> None:
    """Let go of what the frames refer to that an error passed, such as the env that was replaced.

    Python 3.12 and 3.13 crash, or warn, if their garbage collector finds a buffer there that was
    being sent to another process.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _final_error(error: EnvError, num_rebuilt: int) -> EnvError:
    """``error``, with the number of new envs that did not help."""
    if not num_rebuilt:
        return error
    final = EnvError(f"{error.message} (it was replaced {counted(num_rebuilt, 'time')} in a row)")
    final.__cause__ = error
    return final
