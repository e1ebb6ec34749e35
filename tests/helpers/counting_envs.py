"""Envs whose every value can be predicted, and the oracle that predicts it.

An env's state is its :class:`Facts`: which env, which episode, which step of it, and an echo of the
last action. Observations, rewards and infos are functions of the facts, so a value that belongs to
another env, episode, step or action can't pass for the right one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

from distcollect.rollout.spaces import Arrays, Key, flatten, leaves_of, unflatten

LENGTHS = (3, 1, 4, 2)  # of episodes; episodes of one step cause most errors
EPISODES = 200  # the episode counter wraps around here, so that it fits into uint8
_BASES = (64, EPISODES, 64, 16)


class Facts(NamedTuple):
    """The whole state of an env; ``echo`` is 0 after a reset, else 1 to 15."""

    number: int
    episode: int
    step: int
    echo: int


class Coding(NamedTuple):
    """An observation space; turns facts into observations, and flat observations into facts."""

    space: gym.Space[Any]
    encode: Callable[[Facts], Any]
    decode: Callable[[list[np.ndarray]], Sequence[Any]]


def _number(facts: Facts) -> int:
    number = 0
    for fact, base in zip(facts, _BASES, strict=True):
        number = number * base + fact
    return number


def _facts(number: int) -> list[int]:
    facts = []
    for base in reversed(_BASES):
        number, fact = divmod(number, base)
        facts.append(fact)
    return facts[::-1]


_CODES = int(np.prod(_BASES))
_BITS = 2 ** np.arange(_CODES.bit_length())
_THIRD = 1 / 3  # float32 can't hold it, so it shows whether float64 arrived unchanged


def _box(shape: tuple[int, ...], dtype: Any) -> spaces.Box:
    low, high = (0, 255) if dtype is np.uint8 else (-np.inf, np.inf)
    return spaces.Box(low, high, shape, dtype)


_MULTI = spaces.MultiDiscrete(np.array(_BASES), start=np.array([3, 0, -2, 1]))
_DICT = spaces.Dict(
    {
        "place": _box((2,), np.float32),
        "image": _box((2, 2), np.uint8),
        "inner": spaces.Dict(
            {
                "echo": spaces.Discrete(16),
                "pair": spaces.Tuple((_box((), np.float64), spaces.MultiBinary(2))),
            }
        ),
    }
)

# One entry of each dtype that a Box may have; each shows one of the facts.
_DTYPES = {
    np.dtype(name): Facts._fields[index % 4]
    for index, name in enumerate(
        [
            "uint8",
            "uint16",
            "uint32",
            "uint64",
            "int8",
            "int16",
            "int32",
            "int64",
            "float16",
            "float32",
            "float64",
            "bool",
        ]
    )
}


def _limits(dtype: np.dtype[Any]) -> tuple[Any, Any]:
    if dtype.kind == "f":
        return -np.inf, np.inf
    return (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)


def _of_dtype(dtype: np.dtype[Any], fact: int) -> np.ndarray:
    """Two numbers that show ``fact``, near both ends of what the dtype holds."""
    low, high = (0, 0) if dtype.kind == "f" else _limits(dtype)
    if dtype.kind == "b":
        return np.array([fact % 2, 1 - fact % 2], bool)
    return np.array([low + fact, high - fact], dtype)


OBSERVATIONS: dict[str, Coding] = {
    "dtypes": Coding(
        spaces.Dict(
            {dtype.name: spaces.Box(*_limits(dtype), (2,), dtype.type) for dtype in _DTYPES}
        ),
        lambda f: {
            dtype.name: _of_dtype(dtype, getattr(f, name)) for dtype, name in _DTYPES.items()
        },
        # The space sorts its entries: these are uint8, uint16, uint32 and uint64.
        lambda parts: [int(parts[index][0]) for index in (11, 8, 9, 10)],
    ),
    "box32": Coding(
        _box((4,), np.float32), lambda f: np.array(f, np.float32), lambda parts: list(parts[0])
    ),
    "box64": Coding(
        _box((4,), np.float64),
        lambda f: np.array(f) + _THIRD,
        lambda parts: list(parts[0] - _THIRD),
    ),
    "image": Coding(
        _box((4, 3, 2), np.uint8),
        lambda f: np.array(f, np.uint8).repeat(6).reshape(4, 3, 2),
        lambda parts: list(parts[0][:, 0, 0]),
    ),
    "discrete": Coding(
        spaces.Discrete(_CODES, start=-7),
        lambda f: np.int64(_number(f) - 7),
        lambda parts: _facts(int(parts[0]) + 7),
    ),
    "multidiscrete": Coding(
        _MULTI,
        lambda f: np.array(f) + _MULTI.start,
        lambda parts: list(parts[0] - _MULTI.start),
    ),
    "multibinary": Coding(
        spaces.MultiBinary(len(_BITS)),
        lambda f: (_number(f) // _BITS % 2).astype(np.int8),
        lambda parts: _facts(int(parts[0] @ _BITS)),
    ),
    "dict": Coding(
        _DICT,
        lambda f: {
            "place": np.array(f[:2], np.float32),
            "image": np.full((2, 2), f.step, np.uint8),
            "inner": {
                "echo": np.int64(f.echo),
                "pair": (np.array(f.step + _THIRD), np.array([f.step % 2, 1], np.int8)),
            },
        },
        # The space sorts its entries: image, inner.echo, inner.pair, place.
        lambda parts: [*parts[4], parts[0][0, 0], parts[1]],
    ),
    "tuple": Coding(
        spaces.Tuple((_box((3,), np.float32), spaces.Discrete(16))),
        lambda f: (np.array(f[:3], np.float32), np.int64(f.echo)),
        lambda parts: [*parts[0], parts[1]],
    ),
}

ACTIONS: dict[str, gym.Space[Any]] = {
    "discrete": spaces.Discrete(5),
    "discrete_start": spaces.Discrete(4, start=-2),
    "box": spaces.Box(-1, 1, (2,), np.float32),
    "box_scalar": spaces.Box(-1, 1, (), np.float64),
    "multidiscrete": spaces.MultiDiscrete([3, 4]),
    "multibinary": spaces.MultiBinary(3),
    "dict": spaces.Dict(
        {
            "go": spaces.Discrete(3),
            "how": spaces.Tuple((_box((2,), np.float32), spaces.Discrete(4))),
        }
    ),
    "tuple": spaces.Tuple((spaces.Discrete(3), spaces.MultiBinary(2))),
    "dtypes": spaces.Dict(
        {
            "box": spaces.Box(0, 2**16 - 1, (2,), np.uint16),
            "wide": spaces.Box(0, 2**40, (2,), np.uint64),
            "half": spaces.Box(-1, 1, (2,), np.float16),
            "bits": spaces.Box(0, 1, (2,), np.bool_),
            "many": spaces.MultiDiscrete([3, 4], dtype=np.uint32),
        }
    ),
}


def echo_of(parts: Iterable[Any]) -> int:
    """A number from 1 to 15 for the leaves of one action."""
    echo = 1
    for part in parts:
        for x in np.ravel(part).tolist():
            echo = (echo * 7 + int(np.floor(x * 8))) % 15
    return echo + 1


def reward_of(facts: Facts) -> float:
    """The reward of the step that led to ``facts``; float32 holds it exactly."""
    return facts.number % 16 * 4096 + facts.episode % 64 * 64 + facts.step + facts.echo / 16


def ends_at(facts: Facts, lengths: Sequence[int] = LENGTHS) -> tuple[bool, bool]:
    """Whether the step that led to ``facts`` terminated and truncated the episode."""
    turn = facts.number + facts.episode
    over = facts.step >= lengths[turn % len(lengths)]
    return over and turn % 3 != 1, over and turn % 3 != 0


def info_of(facts: Facts) -> dict[str, Any]:
    """The info that goes with ``facts``; ``odd`` is only in every second one."""
    info: dict[str, Any] = {
        "lap": facts.episode,
        "ratio": facts.step / 4,
        "flag": facts.step % 2 == 0,
        "pair": np.array([facts.number + _THIRD, facts.step]),
        "nest": {"depth": facts.step, "deeper": {"echo": np.float32(facts.echo)}},
        "text": "no tensor can hold this",
    }
    if facts.step:
        info["stepped"] = facts.step
    if facts.step % 2:
        info["odd"] = np.array([facts.step, facts.echo], np.int32)
    return info


class CountingEnv(gym.Env[Any, Any]):
    """See the module. ``reuse``: return the same arrays each time, as some envs do."""

    def __init__(
        self,
        number: int = 0,
        observation: str = "box32",
        action: str = "discrete",
        lengths: Sequence[int] = LENGTHS,
        *,
        reuse: bool = False,
    ) -> None:
        self.coding = OBSERVATIONS[observation]
        self.observation_space = self.coding.space
        self.action_space = ACTIONS[action]
        self.lengths = lengths
        self.facts = Facts(number, EPISODES - 1, 0, 0)
        self.running = False
        self.closed = False
        self.num_steps = 0
        self.seeds: list[int | None] = []
        self.kept_actions: list[tuple[Any, int]] = []
        self._shown: list[Any] | None = None
        self._reuse = reuse

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        assert not options, f"options meant for the vector env came through: {options}"
        self.seeds.append(seed)
        self.running = True
        self.facts = Facts(self.facts.number, (self.facts.episode + 1) % EPISODES, 0, 0)
        return self._observe(), info_of(self.facts)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.running, f"step() without a reset() after the end: {self.facts}"
        if isinstance(action, np.floating):
            action = np.asarray(action)  # Gymnasium's vector envs give a scalar Box in this form
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        self.num_steps += 1
        echo = echo_of(flatten(self.action_space, action))
        self.kept_actions = [*self.kept_actions[-3:], (action, echo)]
        for kept, its_echo in self.kept_actions:
            now = echo_of(flatten(self.action_space, kept))
            assert now == its_echo, f"an action was rewritten after it was handed over: {kept}"
        self.facts = self.facts._replace(step=self.facts.step + 1, echo=echo)
        terminated, truncated = ends_at(self.facts, self.lengths)
        self.running = not (terminated or truncated)
        return self._observe(), reward_of(self.facts), terminated, truncated, info_of(self.facts)

    def close(self) -> None:
        self.closed = True

    def _observe(self) -> Any:
        value = self.coding.encode(self.facts)
        if not self._reuse:
            return value
        if self._shown is None:
            self._shown = list(flatten(self.observation_space, value))
        for index, part in enumerate(flatten(self.observation_space, value)):
            if isinstance(part, np.ndarray):
                self._shown[index][...] = part
            else:
                self._shown[index] = part
        return unflatten(self.observation_space, iter(self._shown))


class CountingVectorEnv(VectorEnv[Any, Any, Any]):
    """A native vector env, which returns the same arrays at each step.

    It has no masked reset but in DISABLED mode.
    """

    def __init__(self, envs: Sequence[CountingEnv], mode: AutoresetMode | None) -> None:
        self.envs = envs
        self.num_envs = len(envs)
        self.single_observation_space = envs[0].observation_space
        self.single_action_space = envs[0].action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.mode = mode or AutoresetMode.NEXT_STEP
        self.metadata = {} if mode is None else {"autoreset_mode": mode}
        self._obs: list[Any] = [env.observation_space.sample() for env in envs]
        self._shown: Any = create_empty_array(self.single_observation_space, self.num_envs)
        self._reward = np.zeros(self.num_envs, np.float64)
        self._ends = np.zeros((2, self.num_envs), bool)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        mask = (options or {}).get("reset_mask", np.ones(self.num_envs, bool))
        assert mask.all() or self.mode is AutoresetMode.DISABLED, "no masked resets here"
        infos: dict[str, Any] = {}
        for row in np.flatnonzero(mask).tolist():
            self._obs[row], info = self.envs[row].reset(seed=None if seed is None else seed + row)
            infos = self._add_info(infos, info, row)
        self._ends[:, mask] = False
        return self._show(), infos

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        over: Any = self._ends.any(axis=0)
        infos: dict[str, Any] = {}
        final: Any = create_empty_array(self.single_observation_space, self.num_envs)
        final_obs: list[Any] = list(self._obs)
        for row, (env, action) in enumerate(
            zip(self.envs, iterate(self.action_space, actions), strict=True)
        ):
            if over[row] and self.mode is AutoresetMode.NEXT_STEP:
                self._obs[row], info = env.reset()
                self._reward[row], self._ends[:, row] = 99, False  # nothing may read it
            else:
                self._obs[row], self._reward[row], *self._ends[:, row], info = env.step(action)
                if any(self._ends[:, row]) and self.mode is AutoresetMode.SAME_STEP:
                    final_obs[row] = self._obs[row]
                    infos = self._add_info(infos, {"final_info": info}, row)
                    self._obs[row], info = env.reset()
            infos = self._add_info(infos, info, row)
        if "final_info" in infos:
            # All rows in one array, as in ALE; Gymnasium's own envs give an array of objects.
            infos["final_obs"] = concatenate(self.single_observation_space, final_obs, final)
        return self._show(), self._reward, self._ends[0], self._ends[1], infos

    def close_extras(self, **kwargs: Any) -> None:
        for env in self.envs:
            env.close()

    def _show(self) -> Any:
        return concatenate(self.single_observation_space, self._obs, self._shown)


_MODES = {
    "next": AutoresetMode.NEXT_STEP,
    "same": AutoresetMode.SAME_STEP,
    "disabled": AutoresetMode.DISABLED,
}
# All kinds of envs, which keep the same contract. Names: how they are stepped, their mode,
# and a peculiarity: "live" arrays that they rewrite, observations sent by "pipe", no "label".
VECTOR_KINDS = (
    *(f"{how}-{mode}" for how in ("sync", "async", "native") for mode in _MODES),
    "sync-next-live",
    "async-next-live",
    "async-same-live",
    "async-next-pipe",
    "async-disabled-pipe",
    "native-next-nolabel",
)
ENV_KINDS = ("plain", "plain-reuse", *VECTOR_KINDS)
# AsyncVectorEnv has a process for each env; all other kinds stay in this one.
ASYNC_KINDS = tuple(kind for kind in ENV_KINDS if kind.startswith("async"))
IN_PROCESS_KINDS = tuple(kind for kind in ENV_KINDS if kind not in ASYNC_KINDS)
# Rows of these kinds always reset themselves one step later.
FILLER_KINDS = ("native-next", "native-next-nolabel", "async-next-pipe")


@dataclass(frozen=True)
class CountingMaker:
    """A callable that makes an env or vector env of any kind; each env gets its own number.

    Attributes:
        kind: one of ENV_KINDS.
        num_envs: envs of one worker.
        observation: one of OBSERVATIONS.
        action: one of ACTIONS.
        lengths: of the episodes, in turn.
    """

    kind: str = "plain"
    num_envs: int = 1
    observation: str = "box32"
    action: str = "discrete"
    lengths: tuple[int, ...] = LENGTHS

    def __call__(self, context: Any = None) -> gym.Env[Any, Any] | VectorEnv[Any, Any, Any]:
        worker_id, env_index = (context.worker_id, context.env_index) if context else (0, 0)
        first = worker_id * self.num_envs
        make = partial(
            CountingEnv, observation=self.observation, action=self.action, lengths=self.lengths
        )
        if self.kind.startswith("plain"):
            return make(first + env_index, reuse=self.kind == "plain-reuse")
        return vector_env(self.kind, [partial(make, first + row) for row in range(self.num_envs)])


def vector_env(kind: str, makers: Sequence[Callable[[], CountingEnv]]) -> VectorEnv[Any, Any, Any]:
    """A vector env of one of VECTOR_KINDS, of the envs that these makers make."""
    how, name, *rest = kind.split("-")
    mode, copies = _MODES[name], "live" not in rest
    if how == "sync":
        return SyncVectorEnv(makers, copy=copies, autoreset_mode=mode)
    if how == "async":
        return AsyncVectorEnv(
            makers, copy=copies, shared_memory="pipe" not in rest, autoreset_mode=mode
        )
    return CountingVectorEnv([make() for make in makers], None if "nolabel" in rest else mode)


class Frame(NamedTuple):
    """One transition of one env, as a collector delivers it."""

    obs: Arrays  # {key: [*shape]}, observations and the info entries asked for
    action: Arrays
    reward: Any
    next_obs: Arrays
    terminated: Any
    truncated: Any


def check_frames(
    frames: Iterable[Frame],
    *,
    number: int | None = None,
    observation: str = "box32",
    action: str = "discrete",
    lengths: Sequence[int] = LENGTHS,
    info_keys: Sequence[Key] = (),
    cut_after: int | None = None,
) -> int:
    """Predict every value of one row's frames; AssertionError where one differs.

    Args:
        frames: all frames of the row in order of time, without gaps; the first may stand anywhere
            in an episode.
        number: the env's number; None: whatever the first frame says.
        observation: one of OBSERVATIONS.
        action: one of ACTIONS.
        lengths: of the episodes, in turn.
        info_keys: keys of the info entries among the observations.
        cut_after: the collector truncates each episode after so many steps.

    Returns:
        How many frames there were.
    """
    coding = OBSERVATIONS[observation]
    keys = [leaf.key for leaf in leaves_of(coding.space, "observation")]
    action_keys = [leaf.key for leaf in leaves_of(ACTIONS[action], "action")]
    expected: Facts | None = None
    count = 0
    for count, frame in enumerate(frames, start=1):
        if expected is None:
            decoded = coding.decode([frame.obs[key] for key in keys])
            expected = Facts(*(round(float(fact)) for fact in decoded))
            assert number in (None, expected.number), f"env {expected.number}, expected {number}"
        where = f"frame {count} at {expected}"
        _check_values(frame.obs, expected, coding, info_keys, f"{where}: root")
        echo = echo_of(frame.action[key] for key in action_keys)
        after = expected._replace(step=expected.step + 1, echo=echo)
        _check_values(frame.next_obs, after, coding, info_keys, f"{where}: next")
        assert float(frame.reward) == reward_of(after), f"{where}: reward {frame.reward}"
        terminated, truncated = ends_at(after, lengths)
        if cut_after is not None and after.step >= cut_after and not terminated:
            truncated = True
        ends = (bool(frame.terminated), bool(frame.truncated))
        assert ends == (terminated, truncated), f"{where}: (terminated, truncated) is {ends}"
        over = terminated or truncated
        expected = Facts(after.number, (after.episode + 1) % EPISODES, 0, 0) if over else after
    return count


def _check_values(
    given: Mapping[Key, Any], facts: Facts, coding: Coding, info_keys: Sequence[Key], where: str
) -> None:
    leaves = leaves_of(coding.space, "observation")
    expected: dict[Key, Any] = {
        leaf.key: np.asarray(part, leaf.numpy_dtype)
        for leaf, part in zip(leaves, flatten(coding.space, coding.encode(facts)), strict=True)
    }
    expected.update(_info_values(facts, info_keys))
    assert set(given) == set(expected), f"{where}: entries {sorted(given)}"
    for key, value in expected.items():
        got = np.asarray(given[key])
        assert got.dtype == value.dtype, f"{where}: {key} has dtype {got.dtype}"
        assert got.shape == value.shape, f"{where}: {key} has shape {got.shape}"
        same = np.array_equal(got, value, equal_nan=value.dtype.kind == "f")
        assert same, f"{where}: {key} is {got}, expected {value}"


_MISSING: dict[Key, np.ndarray] = {("stepped",): np.asarray(0), ("odd",): np.zeros(2, np.int32)}


def _info_values(facts: Facts, keys: Sequence[Key]) -> Iterator[tuple[Key, np.ndarray]]:
    for key in keys:
        value: Any = info_of(facts)
        for name in key:
            value = value.get(name)
        if value is None:
            yield key, _MISSING[key]
        else:
            yield key, np.asarray(value, np.float32 if isinstance(value, float) else None)
