"""Envs of EnvPool with a ``batch_size`` below ``num_envs``: the first results are given first."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from distcollect.envs.base import Faulted, InfoKeys
from distcollect.envs.coercion import write
from distcollect.envs.info import first_of_each
from distcollect.errors import EnvError
from distcollect.integrations.envpool.batch import EnvPoolBatch
from distcollect.rollout.spaces import Arrays


class Received(NamedTuple):
    """The results of m of the n envs, m = ``num_ready``. Row ``rows[i]`` has ``obs[i]``.

    Attributes:
        rows: int64 ``[m]``, the rows that these results are of, each once.
        reward: float32 ``[m]``.
        terminated: bool ``[m]``.
        truncated: bool ``[m]``.
        is_frame: bool ``[m]``: the row made a transition.
        is_first: bool ``[m]``: the row was reset, and ``obs`` is the first of an episode. A row
            whose result is neither had an action when all envs were reset; it is being reset now.
    """

    rows: np.ndarray
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    is_frame: np.ndarray
    is_first: np.ndarray


class _Doing(enum.IntEnum):
    """What EnvPool does with a row, and so what the row's next result is."""

    NOTHING = enum.auto()
    STEP = enum.auto()
    RESET = enum.auto()
    # All envs were reset meanwhile: the result is of no use, and the row is reset then.
    OUTDATED_STEP = enum.auto()


class AsyncPoolBatch(EnvPoolBatch):
    """An env of EnvPool whose rows are stepped independently of each other.

    :meth:`send` gives some rows an action, :meth:`reset_rows` resets some, and :meth:`receive`
    waits until ``num_ready`` of these rows have a result. At least so many must be at work then.
    There is no ``step``.
    """

    loop = "loop of envpool"

    def __init__(
        self,
        env: Any,
        info_keys: InfoKeys | None = None,
        maker: Callable[[], Any] | None = None,
    ) -> None:
        """Bring ``env`` into the form of an :class:`~distcollect.envs.base.EnvBatch`.

        Raises:
            ArgumentError: the env has several players, or this EnvPool lacks a private part that is
                needed.
        """
        self._doing = np.full(env.num_envs, _Doing.NOTHING)
        self._next: Any = None  # results that EnvPool returned, and nobody took
        super().__init__(env, info_keys, maker)
        self._allocate(int(self._pool.config["batch_size"]))
        self._find_places(env)
        self._row_at = list(self._pool._state_keys).index("info:env_id")

    def _examples(self, env: Any, resetting: np.ndarray) -> Iterator[Mapping[str, Any]]:
        env.async_reset()
        infos = env.recv(reset=True)[1]
        self._doing.fill(_Doing.RESET)
        self._doing[infos["env_id"]] = _Doing.NOTHING
        yield first_of_each(infos)

    def rebuild(self, rows: Sequence[int], seeds: Sequence[int] | None = None) -> None:
        self._doing.fill(_Doing.NOTHING)
        self._next = None
        super().rebuild(rows, seeds)

    def _reset_member(self, index: int, seeds: Sequence[int] | None) -> None:
        if (size := self._pool.config["batch_size"]) != self.num_ready:
            raise EnvError(
                f"{self.name()}: made a second time, it has another batch_size than before, "
                f"{size} instead of {self.num_ready}"
            )
        if seeds is not None:
            self._warn_of_seeds()
        if self._next is not None:
            self._take()
        self._doing[self._doing == _Doing.STEP] = _Doing.OUTDATED_STEP
        with self._naming_env("reset"):
            self.reset_rows(np.flatnonzero(self._doing == _Doing.NOTHING))
            # The first results, for the policy's first call; they stay the next ones.
            self._next = self._pool._recv()
            self._write_obs(self._next)

    def send(self, rows: np.ndarray, action: Arrays) -> None:
        """Give each of ``rows`` an action: ``[number of rows, *shape]`` for each leaf.

        Raises:
            Faulted: EnvPool raised.
        """
        with self._faults_of("step"):
            self._pool._send(self._native_inputs(action, rows.astype(np.int32)))
            self._doing[rows] = _Doing.STEP

    def reset_rows(self, rows: np.ndarray) -> None:
        """Reset ``rows``, with which EnvPool does nothing.

        Raises:
            Faulted: EnvPool raised.
        """
        if len(rows):
            with self._faults_of("reset"):
                self._pool._reset(rows.astype(np.int32))
                self._doing[rows] = _Doing.RESET

    def receive(self) -> Received:
        """Wait for ``num_ready`` results, and write their observations to ``obs``.

        Raises:
            Faulted: EnvPool raised.
        """
        with self._faults_of("step"):
            self._num_steps += 1
            if self._next is None:
                self._next = self._pool._recv()
            state = self._next
            reward, terminated, truncated, _, _ = self._result
            self._write_obs(state)
            write(reward, state[self._reward_at])
            truncated[:] = state[self._trunc_at]
            np.greater(state[self._done_at], truncated, out=terminated)
            rows, did = self._take()
            self.reset_rows(rows[did == _Doing.OUTDATED_STEP])
            is_frame, is_first = did == _Doing.STEP, did == _Doing.RESET
            return Received(rows, reward, terminated, truncated, is_frame, is_first)

    def _take(self) -> tuple[np.ndarray, np.ndarray]:
        """Take the next results; return their rows, and what EnvPool did with these."""
        rows = np.asarray(self._next[self._row_at]).astype(np.int64)
        did = self._doing[rows]
        self._doing[rows] = _Doing.NOTHING
        self._next = None
        return rows, did

    @contextlib.contextmanager
    def _faults_of(self, call: str) -> Iterator[None]:
        """Turn an exception into a Faulted: no row made a transition."""
        try:
            yield
        except Faulted:
            raise
        except Exception as error:
            raise self._faulted_by(error, call) from error

    def _write_obs(self, state: Sequence[Any]) -> None:
        for leaf, obs, _, place in self._carried_at:
            self._write(obs, state[place], leaf)
