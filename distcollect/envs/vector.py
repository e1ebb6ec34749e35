"""Vector envs, in any auto-reset mode."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from inspect import getattr_static
from typing import Any, cast

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorWrapper
from gymnasium.wrappers.vector import NormalizeObservation, NormalizeReward

from distcollect.envs.base import (
    MISFIT_OF_INFO,
    AnyVectorEnv,
    EnvBatch,
    InfoKeys,
    Remaker,
    Step,
    called,
)
from distcollect.envs.closing import close
from distcollect.envs.coercion import MisfitError, check_result, write
from distcollect.envs.info import EPISODE, first_of_each, space_of_info
from distcollect.errors import ArgumentError, EnvError, users_errors
from distcollect.rollout.spaces import Arrays, Entries, unflatten

_SCALARS = ("rewards", "terminations", "truncations")
# Wrappers that can't reset single rows: the first refuses, the second clears all rows' returns.
_FULL_RESETS_ONLY = (NormalizeObservation, NormalizeReward)
# The packages whose other vector envs and wrappers take a reset mask.
_KNOW_MASKS = ("gymnasium", "ale_py")
# Where a vector env or a wrapper may keep something of the rows, with the halves of AsyncVectorEnv.
_METHODS = (
    *("reset", "step", "observations"),
    *("reset_async", "reset_wait", "step_async", "step_wait"),
)


class VectorBatch(EnvBatch):
    """A ``gymnasium.vector.VectorEnv``, in any of its auto-reset modes."""

    def __init__(self, env: AnyVectorEnv, info_keys: InfoKeys | None, maker: Remaker) -> None:
        """Bring ``env`` into the form of an :class:`EnvBatch`.

        Args:
            env: the vector env.
            info_keys: see :func:`~distcollect.envs.make.make_envs`.
            maker: makes the env again.

        Raises:
            ArgumentError: it has envs of several agents.
        """
        if isinstance(env.single_action_space, Entries):  # of a PettingZooEnv
            raise ArgumentError(
                f"{env}: a vector env loses the rewards of PettingZoo's agents: pass a maker of a "
                "single env, and envs_per_worker"
            )
        resetting = np.zeros(env.num_envs, bool)

        observation_space = env.single_observation_space
        examples = partial(self._examples, env, resetting)
        info_space = space_of_info(info_keys, observation_space, examples, str(env))
        super().__init__(env.num_envs, [env], [maker], info_space)
        # NEXT_STEP is what Gymnasium assumes where an env has no entry.
        mode = AutoresetMode(env.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP))
        self._forgets_resets = mode is AutoresetMode.NEXT_STEP and _forgets_resets(env)
        takes_mask = not self._forgets_resets and self._can_reset_some(env, mode)
        self._resets_in_step = mode is AutoresetMode.SAME_STEP
        self._has_fillers = mode is AutoresetMode.NEXT_STEP and not takes_mask
        self.supports_partial_reset = takes_mask
        self.acting = ~resetting  # False where the next step is a filler
        # Key and dtype of the only leaf of an action, which is faster; None if an action is a tree.
        is_tree = isinstance(self.action_space, spaces.Dict | spaces.Tuple)
        self._only_action = None if is_tree else self._action_parts[0][:2]
        self._all_rows = np.ones(self.num_envs, bool)
        self._real = np.ones(self.num_envs, bool)
        self._result_with_fillers = self._result._replace(real=self._real)

    def _examples(self, env: Any, resetting: np.ndarray) -> Iterator[Mapping[str, Any]]:
        """Examples of ``info``; marks the rows in ``resetting`` whose next step is a filler."""
        yield first_of_each(env.reset()[1])
        _, _, terminated, truncated, infos = env.step(env.action_space.sample())
        np.logical_or(terminated, truncated, out=resetting)
        yield first_of_each(infos)

    def _can_reset_some(self, env: AnyVectorEnv, mode: AutoresetMode) -> bool:
        """Return True if single rows of ``env`` can be reset at any time."""
        return _can_reset_some(env, mode)

    @property
    def _env(self) -> Any:
        return self.members[0]

    def rebuild(self, rows: Sequence[int], seeds: Sequence[int] | None = None) -> None:
        self.acting.fill(True)
        super().rebuild(rows, seeds)

    def _reset_member(self, index: int, seeds: Sequence[int] | None) -> None:
        seed: Any = None if seeds is None else _seed_for(self._env, seeds)
        with self._naming_env("reset"):
            first: Any = self._env.reset(seed=seed)
            check_result("reset", first)
            value, infos = first
            self._put(value)
            self._put_infos(self.obs, infos, self._all_rows)
        if not self._forgets_resets:
            self.acting.fill(True)

    def _advance(self, action: Arrays, rows: Sequence[int] | None) -> Step:
        try:
            return self._advance_all(action)
        except users_errors() as error:
            self._add_fault(0, self._as_env_error(error, "step"), stepped=False)
        return self._forget_ends()

    def _advance_all(self, action: Arrays) -> Step:
        result = self._result
        returned: Any = self._env.step(self._action_for_env(action))
        if self._num_steps == 1:
            check_result("step", returned)
        value, *scalars, infos = returned
        self._put(value)
        self._take_scalars(scalars)
        if self._has_fillers and not self.acting.all():
            result = self._result_with_fillers
            self._real[:] = self.acting
            for array in result[:3]:
                array[~self.acting] = 0
            self.acting.fill(True)
        over = result.terminated | result.truncated
        result.ended[:] = over.nonzero()[0].tolist()
        if self._resets_in_step and result.ended:
            self._put_final(infos, over)
        if self._info_paths:
            self._put_infos(self.obs, infos, self._all_rows)
            if self._resets_in_step and EPISODE in infos:
                for leaf, path in self._info_paths:
                    if path[0] == EPISODE:
                        self.obs[leaf.key][over] = self._missing[leaf.key]
        return result

    def _take_scalars(self, scalars: Sequence[Any]) -> None:
        """Write rewards, terminations and truncations of all rows."""
        for name, array, given in zip(_SCALARS, self._result[:3], scalars, strict=True):
            try:
                write(array, given)
            except MisfitError as misfit:
                raise MisfitError(
                    f"{name} {misfit}, expected {list(array.shape)} and {array.dtype}"
                ) from misfit

    def _action_for_env(self, action: Arrays) -> Any:
        """Return the actions of all rows as the env takes them.

        They are a copy, as an env may keep its action, but the engine reuses the memory.
        """
        if self._only_action is not None:
            key, dtype = self._only_action
            return action[key].astype(dtype)
        parts = (action[key].astype(dtype) for key, dtype, _ in self._action_parts)
        return unflatten(self.action_space, parts)

    def _reset_rows(self, rows: list[int]) -> None:
        if self._has_fillers:
            self.acting[rows] = False
            return
        mask = np.zeros(self.num_envs, bool)
        mask[rows] = True
        try:
            value, infos = self._env.reset(options=_ResetMask(reset_mask=mask))
            self._put(value, rows)
            self._put_infos(self.obs, infos, mask)
        except users_errors() as error:
            self._add_fault(0, self._as_env_error(error, "reset"), stepped=True)

    def _put(self, value: Any, rows: list[int] | None = None) -> None:
        """Write the observations of ``rows``; None: of all."""
        for leaf, path in self._obs_paths:
            part = self._part_at(value, leaf, path)
            array = self.obs[leaf.key]
            if rows is None or np.shape(part) != array.shape:
                self._write(array, part, leaf)
                continue
            some = array[rows]  # a copy
            self._write(some, np.asarray(part)[rows], leaf)
            array[rows] = some

    def _put_final(self, infos: Mapping[str, Any], ended: np.ndarray) -> None:
        """Write the last observation of rows that a SAME_STEP env has reset already."""
        final = infos.get("final_obs")
        if final is None:
            raise EnvError(
                f"{self.name()}: its mode is SAME_STEP, but infos has no 'final_obs'; the env "
                "must return the last observation of an episode there"
            )
        is_tree = isinstance(final, Mapping | tuple)
        for row in np.flatnonzero(ended).tolist():
            for leaf, path in self._obs_paths:
                part = final if is_tree else final[row]
                part = self._part_at(part, leaf, path)
                part = part[row] if is_tree else part
                self._write(self.final[leaf.key][row, ...], part, leaf)
        final_infos = dict(infos.get("final_info", {}))
        # RecordEpisodeStatistics for vector envs writes its entry to infos, not to final_info.
        for name in (EPISODE, f"_{EPISODE}"):
            if name in infos:
                final_infos.setdefault(name, infos[name])
        self._put_infos(self.final, final_infos, ended)

    def _put_infos(self, into: Arrays, infos: Mapping[str, Any], rows: np.ndarray) -> None:
        """Write the entries of ``infos`` for ``rows``; rows without an entry get "missing"."""
        for leaf, path in self._info_paths:
            array = into[leaf.key]
            array[rows] = self._missing[leaf.key]
            has, part = rows, cast("Any", infos)
            for name in path:
                if part is not None:
                    has = has & part.get(f"_{name}", True)
                    part = part.get(name)
            if part is None or not has.any():
                continue
            given = np.asarray(part)[has]
            if given.dtype == object:
                given = np.stack(list(given))
            some = array[has]  # a copy
            self._write(some, given, leaf, MISFIT_OF_INFO)
            array[has] = some

    def call(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        bare = self._env
        with self._naming_env(name):
            while isinstance(bare, VectorWrapper):
                given, inherited = (getattr_static(of, name, None) for of in (bare, VectorWrapper))
                if given is not inherited:
                    return [called(getattr(bare, name), args, kwargs)]
                bare = bare.env
            if isinstance(bare, SyncVectorEnv | AsyncVectorEnv):
                return list(bare.call(name, *args, **kwargs))
            return [called(getattr(bare, name), args, kwargs)]

    def _end(self, env: AnyVectorEnv) -> None:
        bare = env.unwrapped
        with contextlib.suppress(Exception):
            close(env)
        bare.closed = True  # its destructor must not close it again
        if isinstance(bare, SyncVectorEnv):  # its close() stops at the first env that raises
            for each in bare.envs:
                with contextlib.suppress(Exception):
                    each.close()

    def name(self, row: int = 0) -> str:
        return f"vector env {self._env}"


class _ResetMask(dict[str, Any]):
    """Reset options that select some rows.

    Gymnasium's vector envs pop the mask from the options. Wrappers around them look for it later,
    and then reset all rows (RecordEpisodeStatistics in 1.4). This dict still has the mask after it
    was popped; the single envs inside, and subprocesses, only get the other options.
    """

    # A wrapper that converts arrays makes it again, as ``type(options)(**converted)``.
    def __init__(self, reset_mask: np.ndarray, **others: Any) -> None:
        super().__init__(others, reset_mask=reset_mask)
        self._mask = reset_mask

    def __contains__(self, key: object) -> bool:
        return key == "reset_mask" or super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        return self._mask if key == "reset_mask" else super().get(key, default)

    def pop(self, key: str, *default: Any) -> Any:
        value = super().pop(key, *(default or (None,)))
        return self._mask if key == "reset_mask" else value

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def _can_reset_some(env: AnyVectorEnv, mode: AutoresetMode) -> bool:
    """Return True if ``env`` takes a reset mask, in a way that leaves the other rows alone."""
    if mode is AutoresetMode.DISABLED:
        return True  # this mode has no other way to reset
    bare = env.unwrapped
    if not isinstance(bare, SyncVectorEnv | AsyncVectorEnv) and not _is_ale(bare):
        return False
    wrapper = env
    while isinstance(wrapper, VectorWrapper):
        if isinstance(wrapper, _FULL_RESETS_ONLY) or _may_know_no_masks(wrapper):
            return False
        wrapper = wrapper.env
    return not _may_know_no_masks(bare)


def _may_know_no_masks(env: AnyVectorEnv) -> bool:
    """Return True if code of the user's runs in its calls.

    It may take the reset of a row for a reset of all, or wait for a filler step.
    """
    methods = [getattr(type(env), name, None) for name in _METHODS]
    # Code that was generated or compiled may not say from where it is.
    modules = [str(getattr(each, "__module__", "")) for each in methods if each is not None]
    return any(module.partition(".")[0] not in _KNOW_MASKS for module in modules)


def _is_ale(bare: AnyVectorEnv) -> bool:
    """Return True if ``bare`` is a vector env of ALE, which takes a reset mask."""
    module = sys.modules.get("ale_py.vector_env")
    return module is not None and isinstance(bare, module.AtariVectorEnv)


def _seed_for(env: AnyVectorEnv, seeds: Sequence[int]) -> Any:
    """Return the seeds as the env takes them; one with a single generator uses the first."""
    bare = env.unwrapped
    if isinstance(bare, SyncVectorEnv | AsyncVectorEnv):
        return [int(each) for each in seeds]
    if _is_ale(bare):
        return np.array(seeds, np.int64)
    return int(seeds[0])


def _forgets_resets(env: AnyVectorEnv) -> bool:
    """Return True if ``env`` resets a row again in the step after it was reset with a mask.

    An AsyncVectorEnv without shared memory does, in Gymnasium 1.4.
    """
    return isinstance(env.unwrapped, AsyncVectorEnv) and not env.unwrapped.shared_memory
