"""Envs of EnvPool with a ``batch_size`` below ``num_envs``: the first results are given first."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import starmap
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


class AsyncPoolBatch(EnvPoolBatch):
    """An env of EnvPool whose rows are stepped independently of each other.

    :meth:`send` gives some rows an action, :meth:`reset_rows` resets some, and :meth:`receive`
    waits until ``num_ready`` of these rows have a result. At least so many must be at work then.
    There is no ``step``.

    A Ctrl-C may come at any time, also when EnvPool has just returned a result. EnvPool can't be
    asked which rows are at work, so its functions are called in a way that keeps what they return
    in any case: ``list.extend`` calls them and stores the result, with no Python code in between.
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
        self._pool: Any = env  # the env that the following is about
        self._at_work = np.zeros(env.num_envs, bool)
        self._void = np.zeros(env.num_envs, bool)  # rows whose next result is of no use
        self._results: list[Any] = []  # what EnvPool returned, and is not taken yet
        self._sent_to: np.ndarray | None = None
        self._sent: list[Any] = []  # not empty: the rows of _sent_to were sent something
        # It also makes the array _resetting: rows whose next result is the first of an episode.
        super().__init__(env, info_keys, maker)
        self._allocate(int(self._pool.config["batch_size"]))
        self._find_places(env)
        self._row_at = list(self._pool._state_keys).index("info:env_id")

    def _examples(self, env: Any, resetting: np.ndarray) -> Iterator[Mapping[str, Any]]:
        env.async_reset()
        infos = env.recv(reset=True)[1]
        self._at_work.fill(True)
        self._at_work[infos["env_id"]] = False
        resetting[:] = self._at_work
        yield first_of_each(infos)

    def _reset_member(self, index: int, seeds: Sequence[int] | None) -> None:
        if self._env is not self._pool:
            self._pool = self._env
            if self._pool.config["batch_size"] != self.num_ready:
                raise EnvError(
                    f"{self.name()}: made a second time, it has another batch_size than before, "
                    f"{self._pool.config['batch_size']} instead of {self.num_ready}"
                )
            for array in (self._at_work, self._resetting, self._void):
                array.fill(False)
            self._results.clear()
            self._sent_to = None
        if seeds is not None:
            self._warn_of_seeds()
        self._settle()
        self._void |= self._at_work & ~self._resetting
        with self._naming_env("reset"):
            self.reset_rows(np.flatnonzero(~self._at_work))
            # The first of them, for the policy's first call.
            self._write_obs(self._wait())

    def send(self, rows: np.ndarray, action: Arrays) -> None:
        """Give each of ``rows`` an action: ``[number of rows, *shape]`` for each leaf.

        Raises:
            Faulted: EnvPool raised.
        """
        with self._faults_of("step"):
            inputs = self._native_inputs(action, rows.astype(np.int32))
            self._put_to_work(rows, self._pool._send, inputs)

    def reset_rows(self, rows: np.ndarray) -> None:
        """Reset ``rows``, none of which is at work.

        Raises:
            Faulted: EnvPool raised.
        """
        if len(rows):
            with self._faults_of("reset"):
                self._resetting[rows] = True
                self._put_to_work(rows, self._pool._reset, rows.astype(np.int32))

    def receive(self) -> Received:
        """Wait for ``num_ready`` results, and write their observations to ``obs``.

        Raises:
            Faulted: EnvPool raised.
        """
        with self._faults_of("step"):
            self._num_steps += 1
            state = self._wait()
            reward, terminated, truncated, _, _ = self._result
            rows = np.asarray(state[self._row_at]).astype(np.int64)
            self._write_obs(state)
            write(reward, state[self._reward_at])
            truncated[:] = state[self._trunc_at]
            np.greater(state[self._done_at], truncated, out=terminated)
            void = self._void[rows]
            is_first = self._resetting[rows] & ~void
            self._take()
            self.reset_rows(rows[void])
            return Received(rows, reward, terminated, truncated, ~(is_first | void), is_first)

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

    def _put_to_work(self, rows: np.ndarray, function: Callable[..., Any], arg: Any) -> None:
        self._sent_to = rows
        self._sent.extend(starmap(function, ((arg,),)))  # see the class
        self._settle_sent()

    def _wait(self) -> Sequence[Any]:
        """Return the next results, which stay the next ones until they are taken."""
        if not self._results:
            self._results.extend(starmap(self._pool._recv, ((),)))  # see the class
        state: Sequence[Any] = self._results[0]
        return state

    def _take(self) -> None:
        """Note that the rows of the next results are not at work any more."""
        rows = self._results[0][self._row_at]
        self._at_work[rows] = False
        self._resetting[rows] = False
        self._void[rows] = False
        self._results.clear()

    def _settle_sent(self) -> None:
        if self._sent and self._sent_to is not None:
            self._at_work[self._sent_to] = True
        self._sent_to = None
        self._sent.clear()

    def _settle(self) -> None:
        """Bring to an end what an exception broke off."""
        self._settle_sent()
        if self._results:
            self._take()
