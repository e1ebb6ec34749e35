"""Envs of every kind behind one stepping interface.

Whatever the user gives (an id, a callable, an instance, a list; plain or vector envs in any
auto-reset mode) becomes an :class:`EnvBatch`, whose ``step`` is one transition of each env. A row
whose episode ends is reset within the same call: ``obs`` then holds the first observation of the
next episode and ``final`` the true last one.

The one exception are native vector envs that reset themselves a step later (NEXT_STEP) and can't
be told to do it at once: their next step is a filler for that row, and ``Step.real`` says so.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import VectorEnv

from distcollect.errors import ArgumentError, EnvError
from distcollect.rollout.spaces import Arrays, Leaf, leaf_spaces, leaves_of

Env: TypeAlias = gym.Env[Any, Any]
AnyVectorEnv: TypeAlias = VectorEnv[Any, Any, Any]
Maker: TypeAlias = str | Callable[..., Env | AnyVectorEnv] | Env | AnyVectorEnv
Space: TypeAlias = gym.Space[Any]
InfoKeys: TypeAlias = Sequence[str] | Mapping[str, Space | None]
KeyPath: TypeAlias = tuple[str | int, ...]


class Step(NamedTuple):
    """What one step of n envs gave. Its parts are used again: valid until the next step.

    Attributes:
        reward: float32 ``[n]``.
        terminated: bool ``[n]``.
        truncated: bool ``[n]``; also True for a row that was cut and hadn't ended by itself.
        ended: the rows whose episode ended, in ascending order.
        real: bool ``[n]``, False where a row only reset itself: no transition happened and the
            action was ignored. None: all rows are real.
    """

    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    ended: list[int]
    real: np.ndarray | None


class Fault(NamedTuple):
    """What one env raised.

    Attributes:
        rows: those it steps: one, or all of a vector env.
        error: names the env.
        stepped: whether the rows had made their transition, and it was the reset after it that
            failed.
    """

    rows: tuple[int, ...]
    error: EnvError
    stepped: bool


class Faulted(EnvError):
    """Envs raised; all others have done what was asked.

    Those that raised need :meth:`EnvBatch.rebuild` before anything else is asked of them.

    Attributes:
        faults: one for each of them.
        not_stepped: the rows that made no transition, in ascending order.
        cut_short: the rows that did, and whose episode goes no further as others of their vector
            env couldn't be reset.
        result: what the step gave, but for the idle rows; those cut short count as truncated.
    """

    def __init__(self, faults: Sequence[Fault], cut_short: Sequence[int], result: Step) -> None:
        first = faults[0].error
        super().__init__(first.message)
        self.__cause__ = first.__cause__
        self.faults = faults
        self.not_stepped = sorted(
            row for fault in faults if not fault.stepped for row in fault.rows
        )
        self.cut_short = cut_short
        self.result = result


class EnvBatch(ABC):
    """n envs stepped together.

    Attributes:
        num_envs: n.
        observation_space: of a single env.
        action_space: of a single env.
        leaves: what a frame has at its start and its end: observations, then info entries.
        action_leaves: the leaves of an action.
        outcome_leaves: what a frame has at its end only, beside the reward.
        obs: what the policy sees next, ``[n, *shape]`` for each of ``leaves``. These arrays are
            never replaced, only rewritten.
        outcomes: what the last step gave, ``[n, *shape]`` for each of ``outcome_leaves``; never
            replaced either.
        final: shapes as ``obs``; for the rows that ended in the last step their true last
            observation, for others undefined.
        supports_partial_reset: whether rows can be reset at any time.
    """

    supports_partial_reset: bool = True
    _resets_itself: bool = False  # within the step: ``obs`` then holds no end of an episode

    def __init__(
        self,
        num_envs: int,
        observation_space: Space,
        action_space: Space,
        info_space: spaces.Dict,
        outcome_leaves: tuple[Leaf, ...] = (),
    ) -> None:
        observed = leaves_of(observation_space, "observation")
        noted = leaves_of(info_space, "observation")
        self.num_envs = num_envs
        self.observation_space = observation_space
        self.action_space = action_space
        self.leaves: tuple[Leaf, ...] = (*observed, *noted)
        self.action_leaves = leaves_of(action_space, "action")
        self.outcome_leaves = outcome_leaves
        self.outcomes: Arrays = {leaf.key: leaf.zeros(num_envs) for leaf in outcome_leaves}
        self.obs: Arrays = {leaf.key: leaf.zeros(num_envs) for leaf in self.leaves}
        self.final: Arrays = {leaf.key: leaf.zeros(num_envs) for leaf in self.leaves}
        self._observed = with_key_paths(observed, observation_space)
        self._noted = with_key_paths(noted, info_space)
        self._missing = {leaf.key: missing_value(leaf) for leaf in noted}
        self._action_parts = [
            (leaf.key, part.dtype, isinstance(part, spaces.Box) and not part.shape)
            for leaf, (_, part) in zip(self.action_leaves, leaf_spaces(action_space), strict=True)
        ]
        self._pairs = [(self.obs[leaf.key], self.final[leaf.key]) for leaf in self.leaves]
        reward = np.zeros(num_envs, np.float32)
        self._result = Step(reward, np.zeros(num_envs, bool), np.zeros(num_envs, bool), [], None)
        self._faults: list[Fault] = []  # of the call under way

    @abstractmethod
    def reset(self, seeds: Sequence[int] | None = None) -> None:
        """Start a new episode in every row and write ``obs``; needed before the first step.

        Args:
            seeds: one for each row; None: the envs' random generators go on. A native vector env
                has a single generator and takes the first.

        Raises:
            Faulted: an env raised, or its observation doesn't fit its space.
        """

    def step(
        self, action: Arrays, cut: np.ndarray | None = None, rows: Sequence[int] | None = None
    ) -> Step:
        """One transition of each env.

        Args:
            action: ``[n, *shape]`` for each of ``action_leaves``; copied where an env may keep it.
            cut: bool ``[n]``, rows whose episode shall end with this step, whatever the env says.
            rows: those that were idle when the last step raised Faulted, and are to make up for it;
                what that step gave for the others stands in the result. None: all.

        Raises:
            Faulted: an env raised, or its observation doesn't fit its space.
            ArgumentError: ``cut`` was given though ``supports_partial_reset`` is False.
        """
        if cut is not None and not self.supports_partial_reset:
            raise ArgumentError(
                f"{self._name()}: its rows can't be reset one by one, so episodes can't be cut; "
                "pass a maker of single envs and envs_per_worker instead"
            )
        result = self._advance(action, rows)
        ended = result.ended
        over = [] if self._resets_itself else ended
        if rows is not None:
            ended.sort()
            over = [row for row in over if row in rows]
        if cut is not None:
            cut = self._cut_of_stepped(cut) if self._faults else cut
            np.logical_or(result.truncated, cut & ~result.terminated, out=result.truncated)
            cut_rows = [row for row in np.flatnonzero(cut).tolist() if row not in ended]
            if cut_rows:
                over = [*over, *cut_rows]
                ended.extend(cut_rows)
                ended.sort()
        if over:
            for now, last in self._pairs:
                for row in over:
                    last[row] = now[row]
            self._reset_rows(over)
        if self._faults:
            raise self._faulted()
        return result

    @abstractmethod
    def can_rebuild(self, row: int) -> bool:
        """Whether the env of a row can be made anew: one that was given as it is can't."""

    @abstractmethod
    def rebuild(self, rows: Sequence[int], seeds: Sequence[int] | None = None) -> None:
        """Close the env of ``rows``, whatever it says to that, make another one and reset it.

        Args:
            rows: as a :class:`Fault` has them.
            seeds: one for each of these rows; None: random ones.

        Raises:
            EnvError: it could not be made, has other spaces than before, or raised.
        """

    @abstractmethod
    def call(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """What a method of the envs returns (or an attribute is), for each row in order.

        A native vector env is asked as a whole and gives a single value.

        Raises:
            EnvError: there is none of that name, or it raised.
        """

    @abstractmethod
    def close(self) -> None:
        """Close every env, also when one of them raises.

        Raises:
            EnvError: one of them raised; the first is named.
        """

    @abstractmethod
    def _advance(self, action: Arrays, rows: Sequence[int] | None) -> Step:
        """Step all envs or some, write ``obs``, say which rows ended, note faults."""

    @abstractmethod
    def _reset_rows(self, rows: list[int]) -> None:
        """Start new episodes in some rows, write those rows of ``obs``, note faults."""

    @abstractmethod
    def _name(self, row: int = 0) -> str:
        """How messages call the env of a row."""

    def _cut_of_stepped(self, cut: np.ndarray) -> np.ndarray:
        """``cut`` without the rows that made no transition."""
        cut = cut.copy()
        for fault in self._faults:
            cut[list(fault.rows)] = False
        return cut

    def _faulted(self) -> Faulted:
        """The error for the faults of this call, which is over."""
        faults, self._faults = self._faults, []
        result = self._result
        stepped = [row for fault in faults if fault.stepped for row in fault.rows]
        cut_short = [row for row in stepped if row not in result.ended]
        for row in cut_short:
            result.truncated[row] = True
            for now, last in self._pairs:
                last[row] = now[row]
        result.ended[:] = sorted([*result.ended, *cut_short])
        return Faulted(faults, cut_short, result)

    def _check_spaces(self, observation_space: Space, action_space: Space, row: int = 0) -> None:
        """Raise EnvError if an env that was made anew is not what it was."""
        observed = tuple(leaf for leaf, _ in self._observed)
        same = leaves_of(observation_space, "observation") == observed
        if not same or action_space != self.action_space:
            raise EnvError(
                f"{self._name(row)}: made anew, it has other spaces than before; what makes it has "
                "to give the same ones each time"
            )

    def _check(self, value: Any, call: str, row: int = 0, lead: tuple[int, ...] = ()) -> None:
        """Raise EnvError if an observation doesn't fit its space.

        numpy would stretch an array that is too small over the row, and cut fractions off.
        """
        for leaf, way in self._observed:
            where = ".".join(leaf.key)
            part = value
            for name in way:
                try:
                    part = part[name]
                except (KeyError, IndexError, TypeError) as err:
                    raise EnvError(
                        f"{self._name(row)}: {call}() returned an observation without {where!r}, "
                        f"which its observation space has"
                    ) from err
            given, dtype = np.asarray(part), self.obs[leaf.key].dtype
            fractions = given.dtype.kind not in "biu" and dtype.kind in "biu"
            if given.shape != (*lead, *leaf.shape) or fractions:
                raise EnvError(
                    f"{self._name(row)}: {call}() returned {where!r} of shape "
                    f"{list(given.shape)} and dtype {given.dtype}, its observation space says "
                    f"{[*lead, *leaf.shape]} and {dtype}"
                )

    @contextlib.contextmanager
    def _naming_env(self, call: str, row: int = 0) -> Iterator[None]:
        """Turn whatever is raised within into an EnvError that names the env of a row."""
        try:
            yield
        except EnvError:
            raise
        except Exception as err:
            raise EnvError(f"{self._name(row)}: {call}() raised {describe(err)}") from err


def with_key_paths(leaves: tuple[Leaf, ...], space: Space) -> list[tuple[Leaf, KeyPath]]:
    """Each leaf of ``space`` with the way to its part of a value."""
    return [(leaf, way) for leaf, (way, _) in zip(leaves, leaf_spaces(space), strict=True)]


def missing_value(leaf: Leaf) -> Any:
    """What stands where ``info`` has no such entry: NaN, False or 0."""
    return np.nan if leaf.dtype.is_floating_point else 0


def describe(err: Exception) -> str:
    """An exception in words."""
    return f"{type(err).__name__}: {err}"


def shape_error(env_name: str, leaf: Leaf, shape: tuple[int, ...]) -> EnvError:
    """The error for an info entry of another shape."""
    return EnvError(
        f"{env_name}: its info entry {'.'.join(leaf.key)!r} has shape {list(shape)}, expected "
        f"{list(leaf.shape)}; if that is right, declare its space in info_keys"
    )


def called(attribute: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of a method; an attribute as it is."""
    return attribute(*args, **kwargs) if callable(attribute) else attribute


def name_of(env: Env) -> str:
    """What messages call a plain env."""
    return env.spec.id if env.spec is not None else type(env.unwrapped).__name__
