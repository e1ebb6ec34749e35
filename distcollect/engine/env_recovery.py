"""Makes envs anew that raised, as long as that helps."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from distcollect.common.backoff import backoff_s
from distcollect.common.seeding import Stream, env_seed
from distcollect.common.step_counter import StepCounter
from distcollect.envs.base import EnvBatch, Fault
from distcollect.errors import EnvError

log = logging.getLogger(__name__)

# An env that goes on for so many frames without a fault has recovered.
_RECOVERED_AFTER_FRAMES = 1000
_FIRST_DELAY_S = 0.1
_LONGEST_DELAY_S = 5.0


class Stopped(Exception):
    """Collection was ended, between two steps or while an env was to be made anew."""


@dataclass
class _Streak:
    """Faults of an env with no whole episode in between."""

    num_faults: int = 0
    at_step: int = 0  # of its rows, when the last one came


class EnvRecovery:
    """Makes envs anew, each up to ``max_faults`` times in a row.

    Attributes:
        streaks: by the rows of an env; where it is empty, nothing has to be told to
            :meth:`finished`.
    """

    def __init__(self, envs: EnvBatch, counts: StepCounter, max_faults: int) -> None:
        self.streaks: dict[tuple[int, ...], _Streak] = {}
        self._envs = envs
        self._counts = counts
        self._max_faults = max_faults
        self._seeds: Sequence[int] | None = None
        self._num_rebuilt = [0] * envs.num_envs  # since it was seeded
        self._stopped = threading.Event()

    def seed(self, seeds: Sequence[int]) -> None:
        """Derive the seeds of envs made anew from these, one for each row."""
        self._seeds = list(seeds)
        self._num_rebuilt = [0] * len(self._seeds)

    def stop(self) -> None:
        """Make the running or next :meth:`rebuild` raise :class:`Stopped`. From any thread."""
        self._stopped.set()

    def finished(self, rows: Iterable[int]) -> None:
        """Episodes came to their end in ``rows``: the envs work."""
        for row in rows:
            for of_env in [each for each in self.streaks if row in each]:
                del self.streaks[of_env]

    def rebuild(self, fault: Fault) -> None:
        """Make the env anew and reset it, again if that fails, after a while that doubles.

        Raises:
            EnvError: it can't be made anew, or failed too often in a row.
            Stopped: see :meth:`stop`.
        """
        error = fault.error
        while True:
            self._counts.env_faults += 1
            num_faults = self._num_in_a_row(fault.rows)
            if num_faults > self._max_faults or not self._envs.can_rebuild(fault.rows[0]):
                raise _given_up(error, num_faults - 1)
            log.warning("%s; made anew, %d in a row", error.message, num_faults)
            if self._stopped.wait(_delay_s(num_faults)):
                raise Stopped
            try:
                self._envs.rebuild(fault.rows, self._new_seeds(fault.rows))
            except EnvError as another:
                error = another
            else:
                return

    def _num_in_a_row(self, rows: tuple[int, ...]) -> int:
        streak = self.streaks.setdefault(rows, _Streak())
        step = self._counts.stepped // self._envs.num_envs
        if step - streak.at_step >= _RECOVERED_AFTER_FRAMES:
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


def _delay_s(num_faults: int) -> float:
    """None before the first time, then 0.1 s, 0.2 s, 0.4 s and so on."""
    return backoff_s(num_faults, _FIRST_DELAY_S, _LONGEST_DELAY_S)


def _given_up(error: EnvError, num_rebuilt: int) -> EnvError:
    if not num_rebuilt:
        return error
    given_up = EnvError(f"{error.message} (it was made anew {num_rebuilt} times in a row)")
    given_up.__cause__ = error
    return given_up
