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
import importlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, cast

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import find_highest_version, parse_env_id
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper
from gymnasium.wrappers.vector import NormalizeObservation, NormalizeReward

from .errors import ArgumentError, ArgumentTypeError, EnvError, SpaceError
from .spaces import RESERVED, Arrays, Leaf, ends_of, leaves_of, unflatten

Env: TypeAlias = gym.Env[Any, Any]
AnyVectorEnv: TypeAlias = VectorEnv[Any, Any, Any]
Maker: TypeAlias = str | Callable[..., Env | AnyVectorEnv] | Env | AnyVectorEnv
Space: TypeAlias = gym.Space[Any]
InfoKeys: TypeAlias = Sequence[str] | Mapping[str, Space | None]
Way: TypeAlias = tuple[str | int, ...]

_EPISODE = "episode"
# Where the values of these entries come from is documented, so nobody has to declare them.
_KNOWN_INFO: dict[str, Space] = {
    _EPISODE: spaces.Dict(
        {
            "r": spaces.Box(-np.inf, np.inf, (), np.float32),
            "l": spaces.Box(0, np.iinfo(np.int64).max, (), np.int64),
            "t": spaces.Box(0, np.inf, (), np.float32),
        }
    )
}
# A reset of some rows is refused by the first, and clears the returns of all rows in the second.
_WHOLE_RESETS_ONLY = (NormalizeObservation, NormalizeReward)
_NOTHING = object()


@dataclass(frozen=True)
class EnvContext:
    """Which env is being made; given to makers that have a parameter named ``context``.

    Attributes:
        worker_id: the worker's slot.
        env_index: the env's row within the worker; 0 for a maker of a vector env.
        incarnation: which process in that slot.
        seed: the seed of the env's first reset, or None.
    """

    worker_id: int
    env_index: int
    incarnation: int
    seed: int | None


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


class EnvBatch(ABC):
    """n envs stepped together.

    Attributes:
        num_envs: n.
        observation_space: of a single env.
        action_space: of a single env.
        leaves: what a frame has at its start and its end: observations, then info entries.
        action_leaves: the leaves of an action.
        obs: what the policy sees next, ``[n, *shape]`` for each of ``leaves``. These arrays are
            never replaced, only rewritten.
        final: same shapes; for the rows that ended in the last step their true last observation,
            for others undefined.
        can_cut: whether rows can be reset at any time.
    """

    can_cut: bool = True
    _resets_itself: bool = False  # within the step: ``obs`` then holds no end of an episode

    def __init__(
        self, num_envs: int, observation_space: Space, action_space: Space, info_space: spaces.Dict
    ) -> None:
        observed = leaves_of(observation_space, "observation")
        noted = leaves_of(info_space, "observation")
        self.num_envs = num_envs
        self.observation_space = observation_space
        self.action_space = action_space
        self.leaves: tuple[Leaf, ...] = (*observed, *noted)
        self.action_leaves = leaves_of(action_space, "action")
        self.obs: Arrays = {leaf.key: leaf.zeros(num_envs) for leaf in self.leaves}
        self.final: Arrays = {leaf.key: leaf.zeros(num_envs) for leaf in self.leaves}
        self._observed = _with_ways(observed, observation_space)
        self._noted = _with_ways(noted, info_space)
        self._missing = {leaf.key: _missing(leaf) for leaf in noted}
        self._action_parts = [
            (leaf.key, part.dtype, isinstance(part, spaces.Box) and not part.shape)
            for leaf, (_, part) in zip(self.action_leaves, ends_of(action_space), strict=True)
        ]
        self._pairs = [(self.obs[leaf.key], self.final[leaf.key]) for leaf in self.leaves]
        reward = np.zeros(num_envs, np.float32)
        self._result = Step(reward, np.zeros(num_envs, bool), np.zeros(num_envs, bool), [], None)

    @abstractmethod
    def reset(self, seeds: Sequence[int] | None = None) -> None:
        """Start a new episode in every row and write ``obs``; needed before the first step.

        Args:
            seeds: one for each row; None: the envs' random generators go on. A native vector env
                has a single generator and takes the first.

        Raises:
            EnvError: an env raised, or its observation doesn't fit its space.
        """

    def step(self, action: Arrays, cut: np.ndarray | None = None) -> Step:
        """One transition of each env.

        Args:
            action: ``[n, *shape]`` for each of ``action_leaves``; copied where an env may keep it.
            cut: bool ``[n]``, rows whose episode shall end with this step, whatever the env says.

        Raises:
            EnvError: an env raised, or its observation doesn't fit its space.
            ArgumentError: ``cut`` was given though ``can_cut`` is False.
        """
        if cut is not None and not self.can_cut:
            raise ArgumentError(
                f"{self._name()}: its rows can't be reset one by one, so episodes can't be cut"
            )
        result = self._advance(action)
        ended = result.ended
        over = [] if self._resets_itself else ended
        if cut is not None:
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
        return result

    @abstractmethod
    def close(self) -> None:
        """Close every env, also when one of them raises.

        Raises:
            EnvError: one of them raised; the first is named.
        """

    @abstractmethod
    def _advance(self, action: Arrays) -> Step:
        """Step all envs, write ``obs``, and say which rows ended."""

    @abstractmethod
    def _reset_rows(self, rows: list[int]) -> None:
        """Start new episodes in some rows and write those rows of ``obs``."""

    @abstractmethod
    def _name(self, row: int = 0) -> str:
        """How messages call the env of a row."""

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
            raise EnvError(f"{self._name(row)}: {call}() raised {_told(err)}") from err


class PlainBatch(EnvBatch):
    """A list of plain envs, stepped one after the other in this thread."""

    def __init__(self, envs: Sequence[Env], info_keys: InfoKeys | None = None) -> None:
        self._envs = list(envs)
        first = self._envs[0]

        def examples() -> Iterator[Mapping[str, Any]]:
            yield first.reset()[1]
            yield first.step(first.action_space.sample())[4]

        info_space = _info_space(info_keys, first.observation_space, examples, _env_name(first))
        super().__init__(len(envs), first.observation_space, first.action_space, info_space)
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
            self._reset_row(row, None if seeds is None else int(seeds[row]))

    def _advance(self, action: Arrays) -> Step:
        result = self._result
        rewards, terminated, truncated, ended, _ = result
        if ended:
            ended.clear()
            terminated.fill(False)
            truncated.fill(False)
        noted, only, places = self._noted, self._only, self._places
        for leaf, _ in noted:
            self.obs[leaf.key].fill(self._missing[leaf.key])
        actions = self._split(action) if self._discrete is None else action[self._discrete]
        row, value = 0, _NOTHING
        try:
            for row, (step, act) in enumerate(zip(self._steps, actions, strict=True)):
                value, reward, term, trunc, info = step(act)
                if only is not None:
                    only[row][...] = value
                else:
                    self._put(places[row], value)
                rewards[row] = reward
                if term or trunc:
                    terminated[row] = term
                    truncated[row] = trunc
                    ended.append(row)
                if noted:
                    self._put_info(row, info)
        except Exception as err:
            with self._naming_env("step", row):
                # Did the env raise, or numpy when it was to take what the env returned?
                if value is not _NOTHING and not isinstance(err, EnvError):
                    self._check(value, "step", row)
                raise
        return result

    def _reset_rows(self, rows: list[int]) -> None:
        for row in rows:
            self._reset_row(row)

    def _reset_row(self, row: int, seed: int | None = None) -> None:
        with self._naming_env("reset", row):
            value, info = self._envs[row].reset(seed=seed)
            self._check(value, "reset", row)
            self._put(self._places[row], value)
            for leaf, _ in self._noted:
                self.obs[leaf.key][row] = self._missing[leaf.key]
            self._put_info(row, info)

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
    def _put(places: Iterable[tuple[np.ndarray, Way]], value: Any) -> None:
        for place, way in places:
            part = value
            for name in way:
                part = part[name]
            place[...] = part

    def _put_info(self, row: int, info: Mapping[str, Any]) -> None:
        for leaf, way in self._noted:
            part: Any = info
            for name in way:
                part = None if part is None else part.get(name)
            if part is None:
                continue
            # Not for scalars: numpy itself takes nothing else for those.
            if leaf.shape and np.shape(part) != leaf.shape:
                raise _misfit(self._name(row), leaf, np.shape(part))
            self.obs[leaf.key][row] = part

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

    def close(self) -> None:
        with contextlib.ExitStack() as closing:  # goes through all, whichever of them raise
            for row, env in reversed(list(enumerate(self._envs))):
                closing.enter_context(self._naming_env("close", row))
                closing.callback(env.close)

    def _name(self, row: int = 0) -> str:
        return f"env {row} ({_env_name(self._envs[row])})"


class VectorBatch(EnvBatch):
    """A vector env, in whichever of Gymnasium's auto-reset modes."""

    def __init__(self, env: AnyVectorEnv, info_keys: InfoKeys | None = None) -> None:
        resetting = np.zeros(env.num_envs, bool)

        def examples() -> Iterator[Mapping[str, Any]]:
            yield _first_of_each(env.reset()[1])
            _, _, terminated, truncated, infos = env.step(env.action_space.sample())
            np.logical_or(terminated, truncated, out=resetting)
            yield _first_of_each(infos)

        observation_space = env.single_observation_space
        info_space = _info_space(info_keys, observation_space, examples, str(env))
        super().__init__(env.num_envs, observation_space, env.single_action_space, info_space)
        self._env = env
        # Gymnasium's own assumption where an env doesn't say.
        mode = AutoresetMode(env.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP))
        self._forgets_resets = mode is AutoresetMode.NEXT_STEP and _forgets_resets(env)
        masked = not self._forgets_resets and _can_reset_some(env, mode)
        self._resets_itself = mode is AutoresetMode.SAME_STEP
        self._has_fillers = mode is AutoresetMode.NEXT_STEP and not masked
        self.can_cut = masked
        self._resetting = resetting  # rows whose next step will be a filler
        self._all_rows = np.ones(self.num_envs, bool)
        self._real = np.ones(self.num_envs, bool)
        self._result_with_fillers = self._result._replace(real=self._real)

    def reset(self, seeds: Sequence[int] | None = None) -> None:
        seed: Any = None
        if seeds is not None:
            per_row = isinstance(self._env.unwrapped, SyncVectorEnv | AsyncVectorEnv)
            seed = [int(each) for each in seeds] if per_row else int(seeds[0])
        with self._naming_env("reset"):
            value, infos = self._env.reset(seed=seed)
            self._check(value, "reset", lead=(self.num_envs,))
            self._put(value, "reset", slice(None))
            self._put_infos(self.obs, infos, self._all_rows)
        if not self._forgets_resets:
            self._resetting.fill(False)

    def _advance(self, action: Arrays) -> Step:
        result = self._result
        # A copy: an env may keep its action, and the collector uses the memory again.
        parts = (action[key].astype(dtype) for key, dtype, _ in self._action_parts)
        with self._naming_env("step"):
            value, *scalars, infos = self._env.step(unflatten(self.action_space, parts))
            self._put(value, "step", slice(None))
            for array, given in zip(result[:3], scalars, strict=True):
                if np.shape(given) != array.shape:
                    raise EnvError(
                        f"{self._name()}: step() returned rewards, terminations or truncations "
                        f"of shape {list(np.shape(given))} instead of {list(array.shape)}"
                    )
                array[...] = given
            if self._has_fillers and self._resetting.any():
                result = self._result_with_fillers
                np.logical_not(self._resetting, out=self._real)
                for array in result[:3]:
                    array[self._resetting] = 0
                self._resetting.fill(False)
            over = result.terminated | result.truncated
            result.ended[:] = np.flatnonzero(over).tolist()
            if self._resets_itself and result.ended:
                self._put_final(infos, over)
            self._put_infos(self.obs, infos, self._all_rows)
            if self._resets_itself and _EPISODE in infos:
                for leaf, way in self._noted:
                    if way[0] == _EPISODE:
                        self.obs[leaf.key][over] = self._missing[leaf.key]
        return result

    def _reset_rows(self, rows: list[int]) -> None:
        mask = np.zeros(self.num_envs, bool)
        mask[rows] = True
        if self._has_fillers:
            self._resetting |= mask
            return
        with self._naming_env("reset"):
            value, infos = self._env.reset(options=_ResetMask(mask))
            self._put(value, "reset", rows)
            self._put_infos(self.obs, infos, mask)

    def _put(self, value: Any, call: str, rows: Any) -> None:
        for leaf, way in self._observed:
            part = value
            for name in way:
                part = part[name]
            array = self.obs[leaf.key]
            if np.shape(part) != array.shape:
                self._check(value, call, lead=(self.num_envs,))
            array[rows] = part[rows]

    def _put_final(self, infos: Mapping[str, Any], ended: np.ndarray) -> None:
        """Write how the episodes ended whose rows a SAME_STEP env has reset since."""
        final = infos.get("final_obs")
        if final is None:
            raise EnvError(f"{self._name()}: its mode is SAME_STEP, but infos has no 'final_obs'")
        is_tree = isinstance(final, Mapping | tuple)
        for row in np.flatnonzero(ended):
            for leaf, way in self._observed:
                part = final if is_tree else final[row]
                for name in way:
                    part = part[name]
                self.final[leaf.key][row] = part[row] if is_tree else part
        final_infos = dict(infos.get("final_info", {}))
        # The vector wrapper that counts episodes knows nothing of final_info.
        for name in (_EPISODE, f"_{_EPISODE}"):
            if name in infos:
                final_infos.setdefault(name, infos[name])
        self._put_infos(self.final, final_infos, ended)

    def _put_infos(self, into: Arrays, infos: Mapping[str, Any], rows: np.ndarray) -> None:
        """Write the entries of ``infos`` that some of ``rows`` have; the rest is missing there."""
        for leaf, way in self._noted:
            array = into[leaf.key]
            array[rows] = self._missing[leaf.key]
            has, part = rows, cast("Any", infos)
            for name in way:
                if part is not None:
                    has = has & part.get(f"_{name}", True)
                    part = part.get(name)
            if part is None or not has.any():
                continue
            given = np.asarray(part)[has]
            if given.dtype == object:
                given = np.stack(list(given))
            if given.shape[1:] != leaf.shape:
                raise _misfit(self._name(), leaf, given.shape[1:])
            array[has] = given

    def close(self) -> None:
        with self._naming_env("close"):
            self._env.close()

    def _name(self, row: int = 0) -> str:
        return f"vector env {self._env}"


class _ResetMask(dict[str, Any]):
    """Options that reset some rows.

    Gymnasium's vector envs pop the mask, so the wrappers around them, which look later, take the
    reset for one of all rows (RecordEpisodeStatistics in 1.4). Here it can be popped again, while
    the envs inside see, and subprocesses get, the rest of the options only.
    """

    def __init__(self, mask: np.ndarray) -> None:
        super().__init__(reset_mask=mask)
        self._mask = mask

    def __contains__(self, key: object) -> bool:
        return key == "reset_mask" or super().__contains__(key)

    def pop(self, key: str, *default: Any) -> Any:
        value = super().pop(key, *(default or (None,)))
        return self._mask if key == "reset_mask" else value

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def _can_reset_some(env: AnyVectorEnv, mode: AutoresetMode) -> bool:
    """Whether ``env`` takes a reset mask, in a way that leaves the other rows alone."""
    if mode is AutoresetMode.DISABLED:
        return True  # it has no other way
    bare = env.unwrapped
    if not isinstance(bare, SyncVectorEnv | AsyncVectorEnv):
        return False
    wrapper = env
    while isinstance(wrapper, VectorWrapper):
        if isinstance(wrapper, _WHOLE_RESETS_ONLY):
            return False
        wrapper = wrapper.env
    return True


def _forgets_resets(env: AnyVectorEnv) -> bool:
    """Whether envs that were reset after their end do it again at the next step.

    The workers of an AsyncVectorEnv without shared memory do, in Gymnasium 1.4.
    """
    return isinstance(env.unwrapped, AsyncVectorEnv) and not env.unwrapped.shared_memory


def check_env_id(env_id: str) -> None:
    """Raise ArgumentError, with Gymnasium's suggestion, if no such env is registered.

    Nothing is made, but the module in "module:id" is imported.
    """
    module, _, name = env_id.rpartition(":")
    try:
        if module:
            importlib.import_module(module)
        namespace, base, version = parse_env_id(name)
        if version is None and find_highest_version(namespace, base) is not None:
            return
        gym.spec(name)
    except (gym.error.Error, ImportError) as err:
        raise ArgumentError(
            f"no env {env_id!r}: {err}. The module that registers an env can be named with it: "
            "'module:id'"
        ) from err


def make_envs(
    create_env: Maker | Sequence[Maker],
    num_envs: int,
    *,
    info_keys: InfoKeys | None = None,
    contexts: Sequence[EnvContext],
) -> EnvBatch:
    """Make the envs of one worker.

    Args:
        create_env: an env id; a callable that returns an env or a vector env (if it has a
            parameter named ``context``, it is given one); an instance; or a list of these, one
            plain env each.
        num_envs: how many envs. A vector env may have this many rows, or any number if it is 1.
        info_keys: entries of ``info`` that frames carry; a mapping gives their spaces (None: find
            out), where a nested entry is a Dict space. Missing values are NaN, False or 0.
        contexts: one for each env.

    Raises:
        ArgumentError: numbers that don't fit, or an info entry that nothing is known of.
        SpaceError: a space that no batch can carry, or envs whose spaces differ.
        ArgumentTypeError: ``create_env`` is none of these.
        EnvError: a callable raised or returned something else, or an env raised.
    """
    listed = isinstance(create_env, list | tuple)
    makers = (
        list(cast("Sequence[Maker]", create_env))
        if listed
        else [cast("Maker", create_env)] * num_envs
    )
    if len(makers) != num_envs:
        raise ArgumentError(f"{len(makers)} envs are listed, but there are to be {num_envs}")
    envs: list[Env] = []
    opened: list[Env | AnyVectorEnv] = []
    try:
        for row, (maker, context) in enumerate(zip(makers, contexts, strict=True)):
            env = _make(maker, row, context)
            if env is not maker:
                opened.append(env)
            if isinstance(env, VectorEnv):
                _check_rows(env, num_envs, alone=not listed and row == 0)
                return VectorBatch(env, info_keys)
            envs.append(env)
        _check_alike(envs)
        return PlainBatch(envs, info_keys)
    except BaseException:
        for env in opened:
            with contextlib.suppress(Exception):  # the first error is the one to tell
                env.close()
        raise


def _make(maker: Maker, row: int, context: EnvContext) -> Env | AnyVectorEnv:
    # Instances first: an env may be callable too.
    if isinstance(maker, gym.Env | VectorEnv):
        return maker
    if isinstance(maker, str):
        check_env_id(maker)
        name = f"gymnasium.make({maker!r})"
    elif callable(maker):
        name = f"{getattr(maker, '__qualname__', type(maker).__name__)}()"
    else:
        raise ArgumentTypeError(
            "envs are given as an env id, a callable, an env, a vector env, or a list of these, "
            f"not as {type(maker).__name__}"
        )
    try:
        if isinstance(maker, str):
            env: Any = gym.make(maker)
        else:
            env = maker(context=context) if _takes_context(maker) else maker()
    except Exception as err:
        raise EnvError(f"env {row}: {name} raised {_told(err)}") from err
    if not isinstance(env, gym.Env | VectorEnv):
        kind = f"{type(env).__module__}.{type(env).__qualname__}"
        raise EnvError(f"env {row}: {name} returned a {kind}, not a gymnasium Env or VectorEnv")
    return env


def _takes_context(maker: Callable[..., Any]) -> bool:
    try:
        parameter = inspect.signature(maker).parameters.get("context")
    except (TypeError, ValueError):  # some builtins have none
        return False
    return parameter is not None and parameter.kind in (
        parameter.POSITIONAL_OR_KEYWORD,
        parameter.KEYWORD_ONLY,
    )


def _check_rows(env: AnyVectorEnv, num_envs: int, *, alone: bool) -> None:
    if not alone:
        raise ArgumentError(f"{env} is a vector env, but each env of a list must be a plain one")
    if num_envs not in (1, env.num_envs):
        raise ArgumentError(
            f"{env} has {env.num_envs} envs, but there are to be {num_envs}: ask for "
            f"{env.num_envs}, or for 1 to take it as it is"
        )


def _check_alike(envs: Sequence[Env]) -> None:
    """Envs of one batch are different objects with the same spaces."""
    first = envs[0]
    for row, env in enumerate(envs):
        if any(env is other for other in envs[:row]):
            raise ArgumentError(
                f"env {row} ({_env_name(env)}) is the same object as another one; "
                "each row needs an env of its own, so give a callable that makes one"
            )
        for role in ("observation", "action"):
            mine, theirs = getattr(env, f"{role}_space"), getattr(first, f"{role}_space")
            # The bounds of observations may differ, but what an action means may not.
            same = leaves_of(mine, role) == leaves_of(theirs, role)
            if not same or (role == "action" and mine != theirs):
                raise SpaceError(
                    f"env {row} ({_env_name(env)}) has another {role} space than env 0 "
                    f"({_env_name(first)}): {mine} instead of {theirs}"
                )


def _info_space(
    info_keys: InfoKeys | None,
    observation_space: Space,
    examples: Callable[[], Iterator[Mapping[str, Any]]],
    env_name: str,
) -> spaces.Dict:
    """The space of the info entries that frames carry, as far as need be found out by trying."""
    if isinstance(info_keys, str):
        raise ArgumentTypeError(f"info_keys must be a sequence or a mapping, not {info_keys!r}")
    declared = info_keys if isinstance(info_keys, Mapping) else dict.fromkeys(info_keys or ())
    observed = {leaf.key[0] for leaf in leaves_of(observation_space, "observation")}
    for name in declared:
        if name in RESERVED or name in observed:
            raise ArgumentError(
                f"info_keys: {name!r} is the name of something else in a batch; give that entry "
                "of info another name in a wrapper"
            )
    found: dict[str, Any] = {
        name: _KNOWN_INFO.get(name) if space is None else space for name, space in declared.items()
    }
    if None in found.values():
        _find_out(found, examples, env_name)
    for name, space in found.items():
        if any(isinstance(part, int) for way, _ in ends_of(space) for part in way):
            raise SpaceError(f"info_keys: {name!r} is a Tuple space; only Dict can be nested here")
    return spaces.Dict(found)


def _find_out(
    found: dict[str, Any], examples: Callable[[], Iterator[Mapping[str, Any]]], env_name: str
) -> None:
    """Put in the spaces that are None as yet, from what the env gives."""
    seen: set[str] = set()
    try:
        for example in examples():
            seen.update(example)
            for name, space in found.items():
                if space is None and name in example:
                    found[name] = _space_of(example[name])
            if None not in found.values():
                return
    except Exception as err:
        raise EnvError(f"{env_name}: trying it for its info entries raised {_told(err)}") from err
    name = next(name for name, space in found.items() if space is None)
    raise ArgumentError(
        f"info_keys: a reset and a step of {env_name} gave nothing under {name!r} that "
        f"shows a shape and dtype (entries seen: {', '.join(sorted(seen)) or 'none'}); "
        f"declare it: info_keys={{{name!r}: gymnasium.spaces.Box(...)}}"
    )


def _space_of(value: Any) -> Space | None:
    """A space that ``value`` may be from; None if no tensor can hold it."""
    if isinstance(value, Mapping):
        parts = {str(name): _space_of(part) for name, part in value.items()}
        known = {name: part for name, part in parts.items() if part is not None}
        return spaces.Dict(known) if known and len(known) == len(parts) else None
    if not isinstance(value, bool | int | float | np.generic | np.ndarray):
        return None
    array = np.asarray(value)
    # A Python float has no precision of its own; np.float64 scalars count as such.
    dtype = np.dtype(np.float32) if isinstance(value, float) else array.dtype
    match dtype.kind:
        case "f":
            return spaces.Box(-np.inf, np.inf, array.shape, dtype.type)
        case "i" | "u":
            bounds = np.iinfo(array.dtype.type)
            return spaces.Box(bounds.min, bounds.max, array.shape, dtype.type)
        case "b":
            return spaces.Box(0, 1, array.shape, np.bool_)
        case _:
            return None


def _first_of_each(infos: Mapping[str, Any]) -> dict[str, Any]:
    """Of each entry of a vector env's infos, the value of the first row that has it."""
    first: dict[str, Any] = {}
    for name, values in infos.items():
        mask = infos.get(f"_{name}")
        if name.startswith("_") and name[1:] in infos:
            continue
        if isinstance(values, Mapping):
            first[name] = _first_of_each(values)
        elif mask is None or mask.any():
            first[name] = values[0 if mask is None else int(mask.argmax())]
    return first


def _with_ways(leaves: tuple[Leaf, ...], space: Space) -> list[tuple[Leaf, Way]]:
    return [(leaf, way) for leaf, (way, _) in zip(leaves, ends_of(space), strict=True)]


def _missing(leaf: Leaf) -> Any:
    return np.nan if leaf.dtype.is_floating_point else 0


def _told(err: Exception) -> str:
    return f"{type(err).__name__}: {err}"


def _misfit(env_name: str, leaf: Leaf, shape: tuple[int, ...]) -> EnvError:
    return EnvError(
        f"{env_name}: its info entry {'.'.join(leaf.key)!r} has shape {list(shape)}, expected "
        f"{list(leaf.shape)}; if that is right, declare its space in info_keys"
    )


def _env_name(env: Env) -> str:
    return env.spec.id if env.spec is not None else type(env.unwrapped).__name__
