"""Plain envs, stepped one after the other."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from distcollect.envs.base import (
    Env,
    EnvBatch,
    Fault,
    InfoKeys,
    KeyPath,
    Step,
    called,
    name_of,
    shape_error,
    with_key_paths,
)
from distcollect.envs.info import space_of_info
from distcollect.envs.pettingzoo import OUTCOMES, PettingZooEnv
from distcollect.errors import EnvError
from distcollect.rollout.spaces import Arrays, leaves_of, unflatten

_NOTHING = object()


class PlainBatch(EnvBatch):
    """A list of plain envs, stepped one after the other in this thread."""

    def __init__(
        self,
        envs: Sequence[Env],
        info_keys: InfoKeys | None = None,
        makers: Sequence[Callable[[], Any] | None] = (),
    ) -> None:
        """``makers``: what makes each of them anew, None where nothing does.

        What envs with agents tell of them at the end of a frame goes into the outcomes.
        """
        self._envs = list(envs)
        self._makers = makers or [None] * len(self._envs)
        # Rows whose env raised, and those whose env is closed; until it has a successor.
        self._broken: set[int] = set()
        self._closed: set[int] = set()
        first = self._envs[0]

        def examples() -> Iterator[Mapping[str, Any]]:
            yield first.reset()[1]
            yield first.step(first.action_space.sample())[4]

        info_space = space_of_info(info_keys, first.observation_space, examples, name_of(first))
        outcome_space = spaces.Dict()
        if isinstance(first.unwrapped, PettingZooEnv):
            outcome_space = first.unwrapped.outcome_space
        outcome_leaves = leaves_of(outcome_space, "observation")
        super().__init__(
            len(envs), first.observation_space, first.action_space, info_space, outcome_leaves
        )
        self._told = with_key_paths(outcome_leaves, outcome_space)
        self._heeds_info = bool(self._noted or self._told)
        # Discrete actions need no preparation: numpy scalars are copies.
        is_discrete = (
            isinstance(self.action_space, spaces.Discrete) and self.action_space.dtype == np.int64
        )
        self._discrete = self.action_leaves[0].key if is_discrete else None
        # A view of each row: writing through it takes two thirds of the time of array[row] = x.
        views = [[self.obs[leaf.key][row, ...] for leaf, _ in self._observed] for row in self._all]
        ways = [way for _, way in self._observed]
        self._only = [view[0] for view in views] if ways == [()] else None
        self._places = [list(zip(view, ways, strict=True)) for view in views]
        self._steps = [self._first_step(row) for row in self._all]

    @property
    def _all(self) -> range:
        return range(len(self._envs))

    def reset(self, seeds: Sequence[int] | None = None) -> None:
        for row in self._all:
            try:
                self._reset_row(row, None if seeds is None else int(seeds[row]))
            except EnvError as error:
                self._note(row, error, stepped=False)
        if self._faults:
            raise self._faulted()

    def can_rebuild(self, row: int) -> bool:
        return self._makers[row] is not None

    def rebuild(self, rows: Sequence[int], seeds: Sequence[int] | None = None) -> None:
        [row] = rows
        make = self._makers[row]
        assert make is not None
        self._shut(row)
        self._envs[row] = env = make()
        self._closed.discard(row)
        self._broken.discard(row)
        self._check_spaces(env.observation_space, env.action_space, row)
        self._steps[row] = self._first_step(row)
        self._reset_row(row, None if seeds is None else int(seeds[0]))

    def _advance(  # noqa: C901 - the hot loop; calls cost more than what they do
        self, action: Arrays, rows: Sequence[int] | None
    ) -> Step:
        result = self._result
        rewards, terminated, truncated, ended, _ = result
        if ended and rows is None:
            ended.clear()
            terminated.fill(False)
            truncated.fill(False)
        heeds_info, only, places = self._heeds_info, self._only, self._places
        for leaf, _ in self._noted:
            self.obs[leaf.key][... if rows is None else rows] = self._missing[leaf.key]
        actions = self._split(action) if self._discrete is None else action[self._discrete]
        # Not strict: numpy tells the end of an array by an exception, which is slow.
        left: Iterator[Any] = enumerate(zip(self._steps, actions, strict=False))
        if rows is not None:
            left = (each for each in left if each[0] in rows)
        row, value = 0, _NOTHING
        while True:  # goes on behind a row that raised
            try:
                for row, (step, act) in left:
                    value, reward, term, trunc, info = step(act)
                    if only is not None:
                        only[row][...] = value
                    else:
                        self._put(places[row], value)
                    rewards[row] = reward
                    if heeds_info:
                        self._put_info(row, info)
                        self._put_outcomes(row, info)
                    if term or trunc:
                        terminated[row] = term
                        truncated[row] = trunc
                        ended.append(row)
            except Exception as err:  # noqa: BLE001 - told as an EnvError
                error = self._explained(err, "step", row, value)
                self._note(row, error, stepped=False)
            else:
                return result

    def _reset_rows(self, rows: list[int]) -> None:
        # As bare as stepping: episodes of a young policy are short.
        only = self._only
        left = iter(rows)
        row, value = 0, _NOTHING
        while True:
            try:
                for row in left:
                    value = _NOTHING
                    value, info = self._envs[row].reset()
                    if only is not None:
                        only[row][...] = value
                    else:
                        self._put(self._places[row], value)
                    if self._noted:
                        self._put_reset_info(row, info)
            except Exception as err:  # noqa: BLE001 - told as an EnvError
                error = self._explained(err, "reset", row, value)
                self._note(row, error, stepped=True)
            else:
                return

    def _reset_row(self, row: int, seed: int | None) -> None:
        with self._naming_env("reset", row):
            value, info = self._envs[row].reset(seed=seed)
            self._check(value, "reset", row)
            self._put(self._places[row], value)
            self._put_reset_info(row, info)

    def _note(self, row: int, error: EnvError, *, stepped: bool) -> None:
        self._broken.add(row)
        self._faults.append(Fault((row,), error, stepped))

    def _shut(self, row: int) -> None:
        """Close an env that raised, whatever it says to that."""
        if row not in self._closed:
            self._closed.add(row)
            with contextlib.suppress(Exception):
                self._envs[row].close()

    def _explained(self, error: Exception, call: str, row: int, value: Any) -> EnvError:
        """What happened while a row was stepped or reset.

        Did the env raise, or numpy when it was to take ``value`` from it?
        """
        try:
            with self._naming_env(call, row):
                if value is not _NOTHING and not isinstance(error, EnvError):
                    self._check(value, call, row)
                raise error
        except EnvError as explained:
            return explained

    def _first_step(self, row: int) -> Callable[[Any], Any]:
        """The step function of an env that checks its result once and then takes itself away."""
        step = self._envs[row].step

        def checked(action: Any) -> Any:
            result: Any = step(action)
            if not isinstance(result, tuple) or len(result) != 5:
                raise EnvError(
                    f"{self._name(row)}: step() returned no (observation, reward, terminated, "
                    "truncated, info); is it an env of the old gym?"
                )
            self._check(result[0], "step", row)
            self._steps[row] = step
            return result

        return checked

    @staticmethod
    def _put(places: Iterable[tuple[np.ndarray, KeyPath]], value: Any) -> None:
        for place, way in places:
            part = value
            for name in way:
                part = part[name]
            place[...] = part

    def _put_reset_info(self, row: int, info: Mapping[str, Any]) -> None:
        for leaf, _ in self._noted:
            self.obs[leaf.key][row] = self._missing[leaf.key]
        self._put_info(row, info)

    def _put_info(self, row: int, info: Mapping[str, Any]) -> None:
        for leaf, way in self._noted:
            part: Any = info
            for name in way:
                part = None if part is None else part.get(name)
            if part is None:
                continue
            # Not for scalars: numpy itself takes nothing else for those.
            if leaf.shape and np.shape(part) != leaf.shape:
                raise shape_error(self._name(row), leaf, np.shape(part))
            self.obs[leaf.key][row] = part

    def _put_outcomes(self, row: int, info: Mapping[str, Any]) -> None:
        for leaf, way in self._told:
            part = info[OUTCOMES]
            for name in way:
                part = part[name]
            self.outcomes[leaf.key][row] = part

    def _split(self, action: Arrays) -> Iterable[Any]:
        """One action for each env, of the types that its space would sample."""
        columns: list[Iterable[Any]] = []
        for key, dtype, is_scalar_box in self._action_parts:
            array = action[key].astype(dtype)
            columns.append([array[row, ...] for row in self._all] if is_scalar_box else array)
        space = self.action_space
        if not isinstance(space, spaces.Dict | spaces.Tuple):
            return columns[0]
        return [unflatten(space, iter(parts)) for parts in zip(*columns, strict=True)]

    def call(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        results = []
        for row, env in enumerate(self._envs):
            with self._naming_env(name, row):
                results.append(called(env.get_wrapper_attr(name), args, kwargs))
        return results

    def close(self) -> None:
        for row in self._broken:
            self._shut(row)
        with contextlib.ExitStack() as closing:  # goes through all, whichever of them raise
            for row, env in reversed(list(enumerate(self._envs))):
                if row in self._closed:
                    continue
                closing.enter_context(self._naming_env("close", row))
                closing.callback(env.close)

    def _name(self, row: int = 0) -> str:
        return f"env {row} ({name_of(self._envs[row])})"
