"""Envs of EnvPool, which steps the envs of a batch with threads of its own."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import reduce
from importlib import metadata
from operator import getitem
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from distcollect.envs.base import AnyVectorEnv, InfoKeys, Remaker, Step
from distcollect.envs.coercion import write
from distcollect.envs.vector import VectorBatch
from distcollect.envs.vector_ids import VectorMaker
from distcollect.errors import ArgumentError
from distcollect.rollout.spaces import Arrays
from distcollect.version import TESTED

log = logging.getLogger(__name__)

# Arrays up to this size are copied as a whole: that is faster than to select rows.
_SMALL_BYTES = 1 << 16
# The private parts of EnvPool that are used.
_PARTS = ("_from", "_recv", "_reset", "_send", "_state_keys", "_to")


def check_envpool_parts(kind: type) -> None:
    """Raise ArgumentError if a class of EnvPool's envs lacks a private part that is used."""
    if missing := [name for name in _PARTS if not hasattr(kind, name)]:
        raise ArgumentError(
            f"{kind.__name__}: EnvPool {metadata.version('envpool')} lacks {', '.join(missing)}, "
            f"which is used to step its envs; use envpool {TESTED['envpool']}, or envs of another "
            "package"
        )


class EnvPoolBatch(VectorBatch):
    """An env of EnvPool.

    EnvPool itself resets a row in the step after its end, which is a filler for that row. Here a
    row is reset as soon as its episode is over, so there are no fillers, and rows can be cut. The
    resets go on while the engine records the step, until :meth:`finish_resets`.

    EnvPool's ``step`` arranges its arguments and results in each call. That takes longer than
    a step of simple envs, so its native functions are called directly.
    """

    def __init__(self, env: AnyVectorEnv, info_keys: InfoKeys | None, maker: Remaker) -> None:
        """Bring ``env`` into the form of an :class:`~distcollect.envs.base.EnvBatch`.

        Raises:
            ArgumentError: the env has several players, or this EnvPool lacks a private part that is
                needed.
        """
        check_envpool_parts(type(env))
        pool: Any = env
        if pool.config["max_num_players"] > 1:
            raise ArgumentError(f"{pool}: an env with several players can't be collected from")
        super().__init__(env, info_keys, maker)
        self._find_places(env)

    def _find_places(self, pool: Any) -> None:
        """Find out where in EnvPool's native arguments and results everything stands."""
        keys, inputs = list(pool._state_keys), list(pool.spec.action_array_spec)
        self._done_at, self._trunc_at = keys.index("done"), keys.index("trunc")
        self._reward_at = keys.index("reward")
        # EnvPool arranges the numbers of the arrays as it would arrange the arrays.
        observed, infos = pool._to([*range(len(keys))], reset=True, return_info=True)
        self._carried_at = [
            (leaf, self.obs[leaf.key], self.final[leaf.key], reduce(getitem, path, tree))
            for tree, paths in ((observed, self._obs_paths), (infos, self._info_paths))
            for leaf, path in paths
        ]
        # None: an action has several leaves.
        self._native_dtype = None
        if sorted(inputs) == ["action", "env_id", "players.env_id"]:
            self._native_dtype = pool.spec.action_array_spec["action"].dtype
            self._action_at = inputs.index("action")
        self._ids = np.arange(self.num_envs, dtype=np.int32)
        self._being_reset: np.ndarray | None = None
        self._late_error: Exception | None = None

    def _reset_member(self, index: int, seeds: Sequence[int] | None) -> None:
        self.finish_resets()
        self._late_error = None
        make = self._makers[0]
        # EnvPool takes seeds only when it is made.
        if seeds is not None and isinstance(make, VectorMaker):
            self._env.close()
            self.members[0] = make(seeds)
        elif seeds is not None:
            self._warn_of_seeds()
        super()._reset_member(index, None)

    def _warn_of_seeds(self) -> None:
        log.warning(
            "%s: EnvPool can't be given another seed once it was made, so the seed has no effect "
            "on these envs; pass an env id such as 'envpool:Pong-v5', or seed the env where you "
            "make it",
            self.name(),
        )

    def _can_reset_some(self, env: AnyVectorEnv, mode: AutoresetMode) -> bool:
        return True

    def step(self, action: Arrays, rows: Sequence[int] | None = None) -> Step:
        # Rows are given only after the env raised, and then they are all rows.
        self._num_steps += rows is None
        # Where an exception in between left them: EnvPool would return them in this step.
        self.finish_resets()
        try:
            self._raise_late_error()
            return self._step_pool(action)
        except Exception as error:
            self._forget_ends()
            self._add_fault(0, self._as_env_error(error, "step"), stepped=False)
            raise self._faulted() from error

    def _raise_late_error(self) -> None:
        error, self._late_error = self._late_error, None
        if error is not None:
            raise error

    def _native_inputs(self, action: Arrays, ids: np.ndarray) -> Any:
        """Return EnvPool's own arguments for the actions of the rows ``ids``.

        The actions are copies, as the engine reuses the memory.
        """
        if self._native_dtype is None:
            return self._env._from(self._action_for_env(action), ids)
        inputs = [ids, ids, ids]
        inputs[self._action_at] = action[self._action_parts[0][0]].astype(self._native_dtype, "C")
        return inputs

    def _over(self, state: Sequence[Any], rows: slice | np.ndarray) -> np.ndarray:
        """Read the flags of what EnvPool returned of ``rows``; bool ``[m]``, which episodes end."""
        _, terminated, truncated, _, _ = self._result
        truncated[:] = state[self._trunc_at]
        np.greater(state[self._done_at], truncated, out=terminated)  # done, but not truncated
        if self._max_frames:
            truncated |= self._too_old(rows)[rows] & ~terminated
        over: np.ndarray = terminated | truncated
        return over

    def _write_results(self, state: Sequence[Any]) -> None:
        for leaf, obs, _, place in self._carried_at:
            self._write(obs, state[place], leaf)
        write(self._result.reward, state[self._reward_at])

    def _step_pool(self, action: Arrays) -> Step:
        """Step all rows, and reset those whose episode ended."""
        pool = self._env
        pool._send(self._native_inputs(action, self._ids))
        state = pool._recv()
        ended = self._over(state, slice(None)).nonzero()[0]
        if len(ended):
            # These envs reset themselves while the results of the step are written.
            pool._reset(ended.astype(np.int32))
            self._ages[ended] = 0
        self._write_results(state)
        if len(ended):
            for _, obs, final, _ in self._carried_at:
                if obs.nbytes <= _SMALL_BYTES:
                    final[...] = obs
                else:
                    final[ended] = obs[ended]
            self._being_reset = ended
        self._result.ended[:] = ended.tolist()
        return self._result

    def finish_resets(self) -> None:
        ended = self._being_reset
        if ended is None:
            return
        self._being_reset = None
        try:
            state = self._env._recv()
            for leaf, obs, _, place in self._carried_at:
                some = state[place]
                if some.dtype != obs.dtype or some.shape[1:] != leaf.shape:
                    some = np.empty((len(ended), *leaf.shape), leaf.numpy_dtype)
                    self._write(some, state[place], leaf)
                obs[ended] = some
        except Exception as error:  # noqa: BLE001 - the next step raises it
            self._late_error = self._as_env_error(error, "reset")
