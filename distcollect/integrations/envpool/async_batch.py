"""Envs of EnvPool with a ``batch_size`` below ``num_envs``: the first results are given first."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from distcollect.envs.base import InfoKeys, Remaker, Step
from distcollect.envs.info import first_of_each
from distcollect.errors import EnvError
from distcollect.integrations.envpool.batch import EnvPoolBatch
from distcollect.rollout.spaces import Arrays


class _Doing(enum.IntEnum):
    """What EnvPool does with a row, and so what the row's next result is."""

    NOTHING = enum.auto()
    STEP = enum.auto()
    RESET = enum.auto()
    IGNORED_STEP = enum.auto()  # no frame, but the episode goes on
    # All envs were reset meanwhile: the result is of no use, and the row is reset then.
    OUTDATED_STEP = enum.auto()


class AsyncPoolBatch(EnvPoolBatch):
    """An env of EnvPool whose rows are stepped independently of each other.

    A step gives an action to the rows that are in the m slots, and then waits until any m rows have
    a result, of a step or of a reset. From then on the slots stand for these rows.
    """

    def __init__(self, env: Any, info_keys: InfoKeys | None, maker: Remaker) -> None:
        """Bring ``env`` into the form of an :class:`~distcollect.envs.base.EnvBatch`.

        Raises:
            ArgumentError: the env has several players, or this EnvPool lacks a private part that is
                needed.
        """
        self._doing = np.full(env.num_envs, _Doing.NOTHING)
        super().__init__(env, info_keys, maker)
        self._allocate(int(self._env.config["batch_size"]))
        self.final = self.obs  # no reset overwrites the last observation of an episode
        self._real = np.zeros(self.num_ready, bool)
        self._result = self._result._replace(real=self._real)
        self._find_places(env)
        self._row_at = list(self._env._state_keys).index("info:env_id")
        # The rows that wait for others, with their observations; and those that go on after that.
        self._waits = np.zeros(self.num_envs, bool)
        self._kept: Arrays = {leaf.key: leaf.zeros(self.num_envs) for leaf in self.leaves}
        self._resuming = np.zeros(0, np.int64)

    def _examples(self, env: Any, resetting: np.ndarray) -> Iterator[Mapping[str, Any]]:
        env.async_reset()
        infos = env.recv(reset=True)[1]
        self._doing.fill(_Doing.RESET)
        self._doing[infos["env_id"]] = _Doing.NOTHING
        yield first_of_each(infos)

    def rebuild(self, rows: Sequence[int], seeds: Sequence[int] | None = None) -> None:
        self._doing.fill(_Doing.NOTHING)
        super().rebuild(rows, seeds)

    def _reset_member(self, index: int, seeds: Sequence[int] | None) -> None:
        if (size := self._env.config["batch_size"]) != self.num_ready:
            raise EnvError(
                f"{self.name()}: made a second time, it has another batch_size than before, "
                f"{size} instead of {self.num_ready}"
            )
        if seeds is not None:
            self._warn_of_seeds()
        self._waits.fill(False)
        self._resuming = self._resuming[:0]
        self.num_outdated += int(np.count_nonzero(self._doing == _Doing.STEP))
        self._doing[np.isin(self._doing, (_Doing.STEP, _Doing.IGNORED_STEP))] = _Doing.OUTDATED_STEP
        with self._naming_env("reset"):
            self._reset(np.flatnonzero(self._doing == _Doing.NOTHING))
            self._receive()  # for the policy's first call

    def _step_pool(self, action: Arrays) -> Step:
        rows = self.rows[self.acting]
        if len(rows):
            some = {key: array[self.acting] for key, array in action.items()}
            self._env._send(self._native_inputs(some, rows.astype(np.int32)))
            self._doing[rows] = _Doing.STEP
        if len(self._resuming):
            self._show_resuming()
        else:
            self._receive()
        return self._result

    def _receive(self) -> None:
        """Wait for m results, and reset the rows that need it."""
        state = self._env._recv()
        self.rows = rows = np.asarray(state[self._row_at]).astype(np.int64)
        did = self._doing[rows]
        self._doing[rows] = _Doing.NOTHING
        goes_on = (did == _Doing.STEP) | (did == _Doing.IGNORED_STEP)
        ended = self._over(state, rows) & goes_on
        self._write_results(state)
        self.acting = (did == _Doing.RESET) | (goes_on & ~ended)
        self._ages[rows[ended | (did == _Doing.RESET)]] = 0
        self._real[:] = did == _Doing.STEP
        self._result.ended[:] = np.flatnonzero(ended).tolist()
        self._reset(rows[ended | (did == _Doing.OUTDATED_STEP)])

    def _reset(self, rows: np.ndarray) -> None:
        """Reset ``rows``, with which EnvPool does nothing."""
        if len(rows):
            self._env._reset(rows.astype(np.int32))
            self._doing[rows] = _Doing.RESET

    def hold(self, rows: np.ndarray) -> np.ndarray:
        room = self.num_envs - self.num_ready - int(np.count_nonzero(self._waits))
        self._keep(np.flatnonzero(self.acting & rows[self.rows])[: max(0, room)])
        return self._waits

    def _keep(self, slots: np.ndarray) -> None:
        """Let the rows in these slots wait."""
        rows = self.rows[slots]
        for key, obs in self.obs.items():
            self._kept[key][rows] = obs[slots]
        self._waits[rows] = True
        self.acting[slots] = False

    def resume(self) -> bool:
        if not self._waits.any():
            return False
        self._keep(np.flatnonzero(self.acting))
        self._resuming = np.flatnonzero(self._waits)
        self._waits.fill(False)
        self._show_resuming()
        return True

    def _show_resuming(self) -> None:
        """Put rows that waited into the slots."""
        rows, self._resuming = np.split(self._resuming, [self.num_ready])
        self.rows[: len(rows)] = rows
        self.acting = np.arange(self.num_ready) < len(rows)
        for key, obs in self.obs.items():
            obs[: len(rows)] = self._kept[key][rows]
        self._real.fill(False)
        self._result.ended.clear()

    def ignore(self, rows: np.ndarray) -> None:
        self._doing[rows] = _Doing.IGNORED_STEP
