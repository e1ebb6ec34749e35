"""The interface through which envs of every kind are stepped.

Whatever the user gives (an env id, a callable, an env, a list of these; single or vector envs in
any auto-reset mode) becomes an :class:`EnvBatch`. Its ``step`` makes one transition of each env.
A row whose episode ends is reset within the same call: ``obs`` then holds the first observation of
the next episode, and ``final`` the true last one of the old episode.

There is one exception: native vector envs that reset a row in the step after its end (NEXT_STEP)
and take no reset mask. For that row the next step is a filler, and ``Step.real`` is False.
"""

from __future__ import annotations

import contextlib
import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeAlias

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import VectorEnv

from distcollect.envs.bad_actions import blamed
from distcollect.envs.closing import close
from distcollect.envs.coercion import MisfitError, write
from distcollect.errors import EnvError, SpaceError, users_errors
from distcollect.rollout.slab import MANY_ROWS
from distcollect.rollout.spaces import Arrays, Leaf, leaf_spaces, leaves_of

Env: TypeAlias = gym.Env[Any, Any]
AnyVectorEnv: TypeAlias = VectorEnv[Any, Any, Any]
Maker: TypeAlias = str | Callable[..., Env | AnyVectorEnv] | Env | AnyVectorEnv
# What makes an env again that was made; None: nothing does, as the user passed the env itself.
Remaker: TypeAlias = Callable[[], Any] | None
Space: TypeAlias = gym.Space[Any]
InfoKeys: TypeAlias = Sequence[str] | Mapping[str, Space | None]
KeyPath: TypeAlias = tuple[str | int, ...]


# The entry of a step's info whose content goes only under "next" in a batch.
OUTCOMES = "outcomes"

# What is said of a part that does not fit.
_MISFIT_OF_OBSERVATION = "{name!r} {misfit}, its observation space says {expected}"
MISFIT_OF_INFO = (
    "the info entry {name!r} {misfit}, expected {expected} (if it may be like that, declare its "
    "space in info_keys)"
)


class Step(NamedTuple):
    """The result of one step of n envs. The next step overwrites it.

    Attributes:
        reward: float32 ``[n]``.
        terminated: bool ``[n]``.
        truncated: bool ``[n]``; also True for a row that was cut and had not terminated.
        ended: the rows whose episode ended, in ascending order.
        real: bool ``[n]``, False where a row only reset itself: it made no transition and ignored
            the action. None: all rows are real.
    """

    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    ended: list[int]
    real: np.ndarray | None


class EnvState(enum.Enum):
    """What has become of an env; a new one in its place is OPEN again."""

    OPEN = enum.auto()
    RAISED = enum.auto()  # and not closed yet
    CLOSED = enum.auto()


class Fault(NamedTuple):
    """One env raised.

    Attributes:
        rows: the rows that this env steps: one, or all rows of a vector env.
        error: the error; it names the env.
        stepped: True if the rows made their transition and the reset after it failed; False if
            they made no transition.
    """

    rows: tuple[int, ...]
    error: EnvError
    stepped: bool


class Faulted(EnvError):
    """Some envs raised; all other envs completed the call.

    The envs that raised need :meth:`EnvBatch.rebuild` before any other call.

    Attributes:
        faults: one for each env that raised.
        not_stepped: the rows that made no transition, in ascending order.
        cut_short: the rows that made a transition, but whose episode can't continue, because their
            vector env failed to reset other rows.
        result: the result of the step for all rows that made a transition; rows cut short are
            truncated in it.
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


class Envs(ABC):
    """n envs of any kind, without the way in which they are stepped.

    Attributes:
        num_envs: n.
        members: the envs as they were made: one for each row, or a single one that steps all rows.
        engine: the entry point that builds their engine, see
            :mod:`distcollect.integrations`; None: the engine for arrays.
    """

    engine: ClassVar[str | None] = None

    def __init__(self, num_envs: int, members: Sequence[Any], makers: Sequence[Remaker]) -> None:
        """Take over envs; ``makers`` has for each of them what makes it again."""
        self.num_envs = num_envs
        self.members = list(members)
        self._makers = list(makers)
        self._states = [EnvState.OPEN] * len(self.members)

    @abstractmethod
    def name(self, row: int = 0) -> str:
        """Return the name of a row's env in messages."""

    def can_rebuild(self, row: int) -> bool:
        """Return True if a new env can be made for a row; not if the user passed an env object."""
        return self._makers[self._member_of(row)] is not None

    @abstractmethod
    def rebuild(self, rows: Sequence[int], seeds: Sequence[int] | None = None) -> None:
        """Close the env of ``rows``, ignoring errors, make a new one and reset it.

        Args:
            rows: the rows of a :class:`Fault`.
            seeds: one for each of these rows; None: random ones.

        Raises:
            EnvError: the new env could not be made, has other spaces, or raised.
        """

    @abstractmethod
    def call(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Call a method of each env, or read an attribute; one value per row, in order.

        A native vector env is called as a whole and gives a single value.

        Raises:
            EnvError: the env has no such method or attribute, or it raised.
        """

    def close(self) -> None:
        """Close every env, also when one of them raises.

        Raises:
            EnvError: an env raised; the message is about the first one that did.
        """
        with contextlib.ExitStack() as closing:
            for index in reversed(range(len(self.members))):
                if self._states[index] is EnvState.RAISED:
                    self._close_raised(index)
                elif self._states[index] is EnvState.OPEN:
                    closing.enter_context(self._naming_env("close", index))
                    closing.callback(self._close_open, index)

    def _close_open(self, index: int) -> None:
        """Close an env once, also if that raises an Exception; again after a Ctrl-C in it."""
        try:
            self._close(self.members[index])
        except users_errors():
            self._states[index] = EnvState.CLOSED
            raise
        self._states[index] = EnvState.CLOSED

    def _close(self, env: Any) -> None:
        close(env)

    def _close_raised(self, index: int) -> None:
        """Close an env that raised, ignoring errors, and end its processes."""
        if self._states[index] is not EnvState.CLOSED:
            self._states[index] = EnvState.CLOSED
            self._end(self.members[index])

    def _end(self, env: Any) -> None:
        """Close an env in whatever state it is."""
        with contextlib.suppress(*users_errors()):
            env.close()

    def _make_again(self, index: int) -> Any:
        """Make a new env in place of one that raised."""
        make = self._makers[index]
        assert make is not None
        self._close_raised(index)
        self.members[index] = make()
        self._states[index] = EnvState.OPEN
        return self.members[index]

    def _raised(self, index: int) -> None:
        """Note that an env raised; one that is closed stays closed."""
        if self._states[index] is EnvState.OPEN:
            self._states[index] = EnvState.RAISED

    def _member_of(self, row: int) -> int:
        return row if len(self.members) > 1 else 0

    def _rows_of(self, index: int) -> tuple[int, ...]:
        return (index,) if len(self.members) > 1 else tuple(range(self.num_envs))

    def _naming_env(self, call: str, row: int = 0) -> NamingEnv:
        """Turn every exception into an EnvError that names the env of a row."""
        return NamingEnv(lambda error: self._as_env_error(error, call, row))

    def _as_env_error(self, error: BaseException, call: str, row: int = 0) -> EnvError:
        """Return the EnvError for an exception while a row was stepped or reset."""
        if isinstance(error, EnvError):
            return error
        named = EnvError(f"{self.name(row)}: {call}() raised {describe(error)}")
        named.__cause__ = error
        return named


class EnvBatch(Envs):
    """n envs stepped together.

    Attributes:
        num_envs: n.
        num_ready: m, for how many envs at a time actions are chosen: n, unless they give the
            results of some rows at a time. Then what has a row for each env below has m "slots".
        rows: int64 ``[m]``, the rows that the slots stand for since the last step.
        acting: bool ``[m]``, False where the action of the next step has no effect.
        num_outdated: transitions that rows were making when the last reset dropped them.
        observation_space: of a single env.
        action_space: of a single env.
        leaves: leaves that a frame has at its start and at its end: those of the observation,
            then those of info entries.
        action_leaves: the leaves of an action.
        outcome_leaves: leaves that a frame has only at its end, besides the reward.
        obs: what the policy sees next: ``[n, *shape]`` for each of ``leaves``. The arrays are
            rewritten, never replaced.
        outcomes: from the last step: ``[n, *shape]`` for each of ``outcome_leaves``. The arrays
            are rewritten, never replaced.
        final: ``[n, *shape]`` for each of ``leaves``: the true last observation of the rows whose
            episode ended in the last step; undefined for other rows.
        supports_partial_reset: single rows can be reset at any time.
        steps_parts: some rows can be stepped before the others.
    """

    steps_parts: ClassVar[bool] = False
    supports_partial_reset: bool = True
    num_outdated: int = 0

    # The envs reset rows within their step, so that afterwards ``obs`` lacks the last observation.
    _resets_in_step: bool = False

    def __init__(
        self,
        num_envs: int,
        members: Sequence[Any],
        makers: Sequence[Remaker],
        info_space: spaces.Dict,
        outcome_leaves: tuple[Leaf, ...] = (),
    ) -> None:
        """Allocate the arrays.

        Args:
            num_envs: n.
            members: the envs.
            makers: for each env what makes it again.
            info_space: the entries of ``info`` that frames carry, of a single env.
            outcome_leaves: see the class.
        """
        super().__init__(num_envs, members, makers)
        self.observation_space = observation_space = space_of(members[0], "observation")
        self.action_space = action_space = space_of(members[0], "action")
        observed = leaves_of(observation_space, "observation")
        info = leaves_of(info_space, "observation")
        self.leaves: tuple[Leaf, ...] = (*observed, *info)
        self.action_leaves = leaves_of(action_space, "action")
        self.outcome_leaves = outcome_leaves
        self.outcomes: Arrays = {leaf.key: leaf.zeros(num_envs) for leaf in outcome_leaves}
        self._obs_paths = with_key_paths(observed, observation_space)
        self._info_paths = with_key_paths(info, info_space)
        self._missing = {leaf.key: missing_value(leaf) for leaf in info}
        self._action_parts = [
            (leaf.key, part.dtype, isinstance(part, spaces.Box) and not part.shape)
            for leaf, (_, part) in zip(self.action_leaves, leaf_spaces(action_space), strict=True)
        ]
        self._allocate(num_envs)
        self._faults: list[Fault] = []  # of the running call
        self._num_steps = 0
        self._max_frames = 0  # of an episode; 0: any number
        self._ages = np.zeros(num_envs, np.int64)  # frames of the running episodes, if limited

    @property
    def is_aligned(self) -> bool:
        """Return True if every row makes one transition in each step."""
        return self.supports_partial_reset and self.num_ready == self.num_envs

    def limit_frames(self, max_frames: int | None) -> None:
        """Truncate each episode after this many frames, if ``supports_partial_reset``."""
        self._max_frames = max_frames or 0

    def _allocate(self, num_rows: int) -> None:
        """Allocate the arrays of what a step returns, for so many rows."""
        self.num_ready = num_rows
        self.rows = np.arange(num_rows)
        self.acting = np.ones(num_rows, bool)
        self.obs: Arrays = {leaf.key: leaf.zeros(num_rows) for leaf in self.leaves}
        self.final: Arrays = {leaf.key: leaf.zeros(num_rows) for leaf in self.leaves}
        self._obs_and_final = [(self.obs[leaf.key], self.final[leaf.key]) for leaf in self.leaves]
        reward = np.zeros(num_rows, np.float32)
        self._result = Step(reward, np.zeros(num_rows, bool), np.zeros(num_rows, bool), [], None)

    def reset(self, seeds: Sequence[int] | None = None) -> None:
        """Start a new episode in every row, and write ``obs``. Call it before the first step.

        Args:
            seeds: one for each row; None: the envs keep their random generators. A native vector
                env has a single generator and uses the first seed.

        Raises:
            Faulted: an env raised, or its observation does not fit its space.
        """
        self._ages.fill(0)
        for index in range(len(self.members)):
            rows = self._rows_of(index)
            try:
                self._reset_member(index, None if seeds is None else [int(seeds[r]) for r in rows])
            except EnvError as error:
                self._add_fault(index, error, stepped=False)
        if self._faults:
            raise self._faulted()

    def rebuild(self, rows: Sequence[int], seeds: Sequence[int] | None = None) -> None:
        self._ages[list(rows)] = 0
        index = self._member_of(rows[0])
        if self._has_other_space(self._make_again(index)):
            raise EnvError(
                f"{self.name(index)}: made a second time, it has other spaces than before; its "
                "maker must return envs with the same spaces each time"
            )
        self._reset_member(index, seeds)

    def step(self, action: Arrays, rows: Sequence[int] | None = None) -> Step:
        """Make one transition of each env.

        Args:
            action: ``[n, *shape]`` for each of ``action_leaves``; copied where an env may keep it.
            rows: the rows that made no transition when the last step raised Faulted, and make it
                now, or a part of them, see :meth:`begin_parts`; the result keeps the other rows'
                values of that step. None: all rows.

        Raises:
            Faulted: an env raised, or its observation does not fit its space.
            PolicyError: an env raised, and its action is not in the action space.
        """
        if rows is None:
            self._num_steps += 1
        result = self._advance(action, rows)
        ended = result.ended
        if not (ended or self._faults or self._max_frames):
            return result
        to_reset = [] if self._resets_in_step else ended
        if rows is not None:
            ended.sort()
            to_reset = [row for row in to_reset if row in rows]
        if self._max_frames:
            cut = self._too_old(slice(None) if rows is None else rows)
            np.logical_or(result.truncated, cut & ~result.terminated, out=result.truncated)
            cut_rows = [row for row in np.flatnonzero(cut).tolist() if row not in ended]
            if cut_rows:
                to_reset = [*to_reset, *cut_rows]
                ended.extend(cut_rows)
                ended.sort()
            self._ages[ended] = 0
        if to_reset:
            self._keep_final(to_reset)
            self._reset_rows(to_reset)
        if self._faults:
            raise self._faulted(action)
        return result

    def begin_parts(self) -> None:
        """Begin a step that is made in parts, by :meth:`step` with some rows after the others.

        Only for envs with ``steps_parts``.
        """
        self._num_steps += 1
        self._forget_ends()

    def _forget_ends(self) -> Step:
        """Say in the result that no episode ended, and return it."""
        result = self._result
        result.ended.clear()
        result.terminated.fill(False)
        result.truncated.fill(False)
        return result

    def finish_resets(self) -> None:
        """Wait until the rows that ended in the last step are reset, and ``obs`` has their start.

        Call it after a step in which rows ended, before ``obs`` is read. If a reset failed, the
        next step raises Faulted.
        """

    def hold(self, rows: np.ndarray) -> np.ndarray:
        """Let those of ``rows``, bool ``[n]``, wait that need an action, while enough others act.

        Only envs that give the results of some rows at a time need this, and the next two. Returns
        bool ``[n]``, which rows wait now.
        """
        return np.zeros(self.num_envs, bool)

    def resume(self) -> bool:
        """Go on with the rows that wait; False: there are none."""
        return False

    def ignore(self, rows: np.ndarray) -> None:
        """The steps that ``rows``, int64 ``[k]``, are in will be no frames."""

    @abstractmethod
    def _advance(self, action: Arrays, rows: Sequence[int] | None) -> Step:
        """Step all envs, or those of ``rows``; write ``obs`` and the result, collect faults."""

    @abstractmethod
    def _reset_rows(self, rows: list[int]) -> None:
        """Start new episodes in ``rows``; write these rows of ``obs``, collect faults."""

    @abstractmethod
    def _reset_member(self, index: int, seeds: Sequence[int] | None) -> None:
        """Start new episodes in all rows of an env, with a seed for each.

        Raises:
            EnvError: it raised, or its observation does not fit its space.
        """

    def _add_fault(self, index: int, error: EnvError, *, stepped: bool) -> None:
        self._raised(index)
        self._faults.append(Fault(self._rows_of(index), error, stepped))

    def _keep_final(self, rows: list[int]) -> None:
        """Copy the last observations of ``rows`` to ``final``, before they are reset."""
        for obs, final in self._obs_and_final:
            if len(rows) < MANY_ROWS:
                for row in rows:
                    final[row] = obs[row]
            else:
                final[rows] = obs[rows]

    def _too_old(self, rows: slice | np.ndarray | Sequence[int]) -> np.ndarray:
        """Count a frame of each of ``rows``; bool ``[n]``, True where the episode is to end."""
        self._ages[rows] += 1
        for fault in self._faults:  # they made no transition
            self._ages[list(fault.rows)] = 0
        too_old: np.ndarray = self._ages >= self._max_frames
        return too_old

    def _faulted(self, action: Arrays | None = None) -> Faulted:
        """Return the error to raise at the end of a call in which envs raised.

        Raises:
            PolicyError: it was a step with an ``action`` that an env can't take.
        """
        faults, self._faults = self._faults, []
        if action is not None:
            faults = blamed(self, faults, action)
        result = self._result
        stepped = [row for fault in faults if fault.stepped for row in fault.rows]
        cut_short = [row for row in stepped if row not in result.ended]
        for row in cut_short:
            result.truncated[row] = True
            for obs, final in self._obs_and_final:
                final[row] = obs[row]
        result.ended[:] = sorted([*result.ended, *cut_short])
        return Faulted(faults, cut_short, result)

    def _has_other_space(self, env: Any) -> str:
        """Return which space, "observation" or "action", an env has not as the others; or ""."""
        # The bounds of observations may differ; action spaces must be equal.
        observed = leaves_of(space_of(env, "observation"), "observation")
        if observed != tuple(leaf for leaf, _ in self._obs_paths):
            return "observation"
        return "" if space_of(env, "action") == self.action_space else "action"

    def _part_at(self, value: Any, leaf: Leaf, path: KeyPath) -> Any:
        """Return the part of an observation that belongs to a leaf.

        Raises:
            MisfitError: the observation has no such part.
        """
        for name in path:
            try:
                value = value[name]
            except (KeyError, IndexError, TypeError) as err:
                raise MisfitError(
                    f"an observation without {'.'.join(leaf.key)!r}, which its observation space "
                    "has"
                ) from err
        return value

    def _write(
        self, array: np.ndarray, part: Any, leaf: Leaf, message: str = _MISFIT_OF_OBSERVATION
    ) -> None:
        """Write a part of an observation, or of what ``message`` is about, into ``array``.

        Raises:
            MisfitError: ``array`` has another shape, or can't hold its numbers.
        """
        try:
            write(array, part)
        except MisfitError as misfit:
            expected = f"{list(array.shape)} and {array.dtype}"
            name = ".".join(leaf.key)
            raise MisfitError(
                message.format(name=name, misfit=misfit, expected=expected)
            ) from misfit

    def _as_env_error(self, error: BaseException, call: str, row: int = 0) -> EnvError:
        if not isinstance(error, MisfitError):
            return super()._as_env_error(error, call, row)
        # The number of the last step is counted over all episodes.
        # Without the MisfitError as its cause: the traceback would show our own code only.
        wrong = EnvError(f"{self.name(row)}: {call}() returned {error} (step {self._num_steps:,})")
        wrong.is_permanent = call == "step" and self._num_steps == 1
        return wrong


class NamingEnv:
    """A context that turns every exception into an EnvError that names the env.

    It is no generator: ``contextlib`` raises a StopIteration again if it became a RuntimeError.
    """

    def __init__(self, named: Callable[[BaseException], EnvError]) -> None:
        """``named`` makes the EnvError for an exception."""
        self._named = named

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, EnvError | None) and isinstance(error, users_errors()):
            named = self._named(error)
            raise named from named.__cause__


def with_key_paths(leaves: tuple[Leaf, ...], space: Space) -> list[tuple[Leaf, KeyPath]]:
    """Return each leaf of ``space`` with the path to its part of a value."""
    return [(leaf, path) for leaf, (path, _) in zip(leaves, leaf_spaces(space), strict=True)]


def missing_value(leaf: Leaf) -> Any:
    """Return the value of a leaf where ``info`` lacks the entry: NaN, False or 0."""
    return np.nan if leaf.dtype.is_floating_point else 0


def describe(err: BaseException) -> str:
    """Return an exception's type and message."""
    return f"{type(err).__name__}: {err}"


def called(attribute: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the result of a method; the value of any other attribute."""
    return attribute(*args, **kwargs) if callable(attribute) else attribute


def space_of(env: Any, role: str) -> Any:
    """Return the "observation" or "action" space of a single env, also if it is a vector env.

    Raises:
        SpaceError: it has none of Gymnasium's.
    """
    space = getattr(env, f"single_{role}_space", None)
    if space is None:
        space = getattr(env, f"{role}_space", None)
    if not isinstance(space, gym.Space):
        raise SpaceError(
            f"the {role}_space of {type(env.unwrapped).__name__} is {space!r}: set it in __init__ "
            "to one of gymnasium.spaces"
        )
    return space


def name_of(env: Env) -> str:
    """Return the name of a single env in messages."""
    return env.spec.id if env.spec is not None else type(env.unwrapped).__name__
