"""Single envs, stepped one after the other in this thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from gymnasium import spaces

from distcollect.envs.base import (
    MISFIT_OF_INFO,
    OUTCOMES,
    Env,
    EnvBatch,
    InfoKeys,
    KeyPath,
    Remaker,
    Step,
    called,
    name_of,
    space_of,
    with_key_paths,
)
from distcollect.envs.coercion import MisfitError, check_result, flag, number
from distcollect.envs.info import space_of_info
from distcollect.errors import SpaceError, users_errors
from distcollect.rollout.spaces import Arrays, Entries, Leaf, leaves_of, unflatten

V = TypeVar("V")

_FALSE = np.False_
# What is said of a result that can't be used.
_A_REWARD = "the reward, which must be one number"
_TERMINATED = "'terminated', which must be True or False"
_TRUNCATED = "'truncated', which must be True or False"


class SingleEnvBatch(EnvBatch):
    """A list of ``gymnasium.Env``, one for each row."""

    steps_parts = True

    def __init__(
        self, envs: Sequence[Env], info_keys: InfoKeys | None, makers: Sequence[Remaker]
    ) -> None:
        """Bring ``envs`` into the form of an :class:`EnvBatch`.

        The rewards of a PettingZoo env's agents go into the outcomes.

        Args:
            envs: one for each row.
            info_keys: see :func:`~distcollect.envs.make.make_envs`.
            makers: for each row what makes its env again.
        """
        first = envs[0]

        def examples() -> Iterator[Mapping[str, Any]]:
            yield first.reset()[1]
            yield first.step(first.action_space.sample())[4]

        info_space = space_of_info(
            info_keys, space_of(first, "observation"), examples, name_of(first)
        )
        outcome_space = getattr(first.unwrapped, "outcome_space", None)
        if not isinstance(outcome_space, Entries):  # an attribute of the user's, or none
            outcome_space = Entries()
        outcome_leaves = leaves_of(outcome_space, "observation")
        super().__init__(len(envs), envs, makers, info_space, outcome_leaves)
        for row, env in enumerate(envs):
            if role := self._has_other_space(env):
                raise SpaceError(
                    f"{self.name(row)} has another {role} space than env 0 ({name_of(first)}): "
                    f"{space_of(env, role)} instead of {space_of(first, role)}; all envs of a "
                    "worker must have the same spaces"
                )
        # The entries of info that a reset gives, and those that a step gives.
        self._at_reset = [(self.obs[leaf.key], leaf, path) for leaf, path in self._info_paths]
        self._at_step = [
            *self._at_reset,
            *(
                (self.outcomes[leaf.key], leaf, (OUTCOMES, *path))
                for leaf, path in with_key_paths(outcome_leaves, outcome_space)
            ),
        ]
        # Discrete actions need no preparation: numpy scalars are copies.
        is_discrete = (
            isinstance(self.action_space, spaces.Discrete) and self.action_space.dtype == np.int64
        )
        self._discrete_key = self.action_leaves[0].key if is_discrete else None
        # Views of each row: writing through one takes two thirds of the time of array[row] = x.
        self._views = [
            [(leaf, self.obs[leaf.key][row, ...], path) for leaf, path in self._obs_paths]
            for row in range(self.num_envs)
        ]
        self._cells = self._cells_of_rows()
        # Faster to write to than the array, and takes no None.
        self._reward_cells: Any = self._result.reward.data
        self._steps = [self._checked_step(row) for row in range(self.num_envs)]

    def _cells_of_rows(self) -> list[memoryview] | None:
        """Return the memory of each row, if the observation is one vector; else None.

        An assignment to it refuses another shape or dtype, and takes no longer than one to an
        array, which would stretch and convert what does not fit.
        """
        if [path for _, path in self._obs_paths] != [()] or self._views[0][0][1].ndim != 1:
            return None
        return [view.data for [(_, view, _)] in self._views]

    def _advance(  # noqa: C901, PLR0912 - a hot loop: calls would cost more than what they do
        self, action: Arrays, rows: Sequence[int] | None
    ) -> Step:
        result = self._result
        _, terminated, truncated, ended, _ = result
        if ended and rows is None:
            ended.clear()
            terminated.fill(False)
            truncated.fill(False)
        entries, cells, reward_cells = self._at_step, self._cells, self._reward_cells
        actions = self._split(action) if self._discrete_key is None else action[self._discrete_key]
        # Not strict: numpy signals the end of an array by an exception, which is slow.
        remaining: Iterator[Any] = enumerate(zip(self._steps, actions, strict=False))
        if rows is not None:
            remaining = (each for each in remaining if each[0] in rows)
        for row, (step, act) in remaining:
            try:
                value, reward, term, trunc, info = step(act)
                if cells is None:
                    self._put(row, value)
                else:
                    try:
                        cells[row][:] = value
                    except (TypeError, ValueError):
                        self._put(row, value)
                        cells = self._cells
                try:
                    reward_cells[row] = reward
                except (TypeError, ValueError, DeprecationWarning):  # NumPy 1.25 to 2.3 warns
                    reward_cells[row] = _converted(number, reward, _A_REWARD)
                if entries:
                    self._put_info(row, info, entries)
                if (term is not False and term is not _FALSE) or (
                    trunc is not False and trunc is not _FALSE
                ):
                    if term.__class__ is not bool:
                        term = _converted(flag, term, _TERMINATED)
                    if trunc.__class__ is not bool:
                        trunc = _converted(flag, trunc, _TRUNCATED)
                    if term or trunc:
                        terminated[row], truncated[row] = term, trunc
                        ended.append(row)
            except users_errors() as err:
                self._add_fault(row, self._as_env_error(err, "step", row), stepped=False)
        return result

    def _reset_rows(self, rows: list[int]) -> None:
        for row in rows:
            try:
                value, info = self.members[row].reset()
                self._put(row, value)
                if self._at_reset:
                    self._put_info(row, info, self._at_reset)
            except users_errors() as err:
                self._add_fault(row, self._as_env_error(err, "reset", row), stepped=True)

    def _reset_member(self, index: int, seeds: Sequence[int] | None) -> None:
        self._steps[index] = self._checked_step(index)
        with self._naming_env("reset", index):
            result: Any = self.members[index].reset(seed=None if seeds is None else seeds[0])
            check_result("reset", result)
            value, info = result
            self._put(index, value)
            self._put_info(index, info, self._at_reset)

    def _checked_step(self, row: int) -> Callable[[Any], Any]:
        """Return a row's step function, which checks its first result, then makes way for it."""
        step = self.members[row].step

        def checked(action: Any) -> Any:
            result: Any = step(action)
            check_result("step", result)
            self._steps[row] = step
            return result

        return checked

    def _put(self, row: int, value: Any) -> None:
        """Write an observation to its row; MisfitError if it does not fit."""
        for leaf, view, path in self._views[row]:
            part = self._part_at(value, leaf, path) if path else value
            self._write(view, part, leaf)
            if part.__class__ is not np.ndarray or part.dtype != view.dtype:
                self._cells = None  # this env converts: trying the cells first would be slower

    def _put_info(
        self,
        row: int,
        info: Mapping[str, Any],
        entries: Sequence[tuple[np.ndarray, Leaf, KeyPath]],
    ) -> None:
        for array, leaf, path in entries:
            part: Any = info
            for name in path:
                part = None if part is None else part.get(name)
            if part is None:
                array[row] = self._missing[leaf.key]
            else:
                self._write(array[row, ...], part, leaf, MISFIT_OF_INFO)

    def _split(self, action: Arrays) -> Iterable[Any]:
        """One action for each env, of the types that its space samples."""
        columns: list[Iterable[Any]] = []
        for key, dtype, is_scalar_box in self._action_parts:
            array = action[key].astype(dtype)
            columns.append(
                [array[row, ...] for row in range(self.num_envs)] if is_scalar_box else array
            )
        space = self.action_space
        if not isinstance(space, spaces.Dict | spaces.Tuple):
            return columns[0]
        return [unflatten(space, iter(parts)) for parts in zip(*columns, strict=True)]

    def call(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        results = []
        for row, env in enumerate(self.members):
            with self._naming_env(name, row):
                results.append(called(env.get_wrapper_attr(name), args, kwargs))
        return results

    def name(self, row: int = 0) -> str:
        return f"env {row} ({name_of(self.members[row])})"


def _converted(convert: Callable[[Any], V], value: Any, role: str) -> V:
    """Convert a value; the MisfitError if it can't be says that it was returned as ``role``."""
    try:
        return convert(value)
    except MisfitError as misfit:
        raise MisfitError(f"{misfit} as {role}") from misfit
