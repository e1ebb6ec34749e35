"""TorchRL envs, plain or batched, with or without transforms.

It imports torchrl, which changes how the whole process starts others. So it is itself imported only
where the user made such an env, and has thereby imported torchrl.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from tensordict import TensorDictBase
from torchrl.data import Bounded, Categorical, Composite
from torchrl.envs import AutoResetTransform, Compose, TransformedEnv, VecGymEnvTransform

from distcollect.errors import ArgumentError, EnvError, SpaceError
from distcollect.spaces import Arrays, Entries, Key, Leaf, leaves_of, numpy_dtype

from .base import EnvBatch, Fault, Space, Step, called

TorchRLEnv: TypeAlias = Any  # torchrl.envs.EnvBase, which has no types

_DONE = ("done", "terminated", "truncated")
# These reset rows when the rows end, and at no other time.
_RESETS_ITSELF = (AutoResetTransform, VecGymEnvTransform)


class SpecSpace(gym.Space[Any]):
    """The values of a spec for which Gymnasium has no space, one-hot actions for instance."""

    def __init__(self, spec: Any) -> None:
        super().__init__(tuple(spec.shape), numpy_dtype(spec.dtype))
        self._spec = spec

    def sample(self, mask: Any = None, probability: Any = None) -> np.ndarray:
        """Draw a value; torch's global generator, which specs draw from, stays as it was."""
        state = torch.get_rng_state()
        try:
            torch.default_generator.manual_seed(int(self.np_random.integers(2**63)))
            drawn: np.ndarray = self._spec.rand().numpy()
            return drawn
        finally:
            torch.set_rng_state(state)

    def contains(self, x: Any) -> bool:
        """Whether the spec has this value."""
        return bool(self._spec.is_in(torch.as_tensor(x)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SpecSpace) and bool(self._spec == other._spec)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self._spec).__name__}{list(self._spec.shape)}"


@dataclass(frozen=True)
class _Specs:
    """What an env reads and gives, as spaces and leaves of a single row.

    Attributes:
        observation_space: the entry "observation" if there is one, else a Dict of all entries.
        info_space: the other entries, and flags of parts of the env (of its agents, say).
        action_space: of all actions.
        outcomes: what a step gives and a reset doesn't, but for the reward of the whole env.
    """

    observation_space: Space
    info_space: spaces.Dict
    action_space: Space
    outcomes: tuple[Leaf, ...]

    @classmethod
    def of(cls, env: TorchRLEnv, first: TensorDictBase) -> _Specs:
        """Those of an env, whose reset gave ``first``.

        Raises:
            SpaceError: no batch can carry them.
        """
        given = _entries_of(env.full_observation_spec_unbatched)
        given |= {
            key: space
            for key, space in _entries_of(env.full_done_spec_unbatched).items()
            if key not in [(name,) for name in _DONE]
        }
        always = {key: space for key, space in given.items() if first.get(key) is not None}
        single = always.pop(("observation",), None)
        observation_space, info_space = single, _tree_of(always)
        if observation_space is None:
            observation_space, info_space = info_space, spaces.Dict()
        actions = _entries_of(env.full_action_spec_unbatched)
        action_space = actions.get(("action",))
        if action_space is None or len(actions) > 1:
            action_space = Entries(_tree_of(actions).spaces)
        at_the_end = {key: space for key, space in given.items() if first.get(key) is None}
        rewards = _entries_of(env.full_reward_spec_unbatched)
        reward = rewards.pop(("reward",), None)
        if reward is not None and np.prod(reward.shape or ()) != 1:
            raise SpaceError(
                f"the env's reward has shape {list(reward.shape or ())} instead of [1]: weigh its "
                "parts into one in a transform, under another key they are kept"
            )
        outcomes = leaves_of(_tree_of({**at_the_end, **rewards}), "observation")
        return cls(observation_space, info_space, action_space, outcomes)


def _entries_of(spec: Composite) -> dict[Key, Space]:
    """The space of each leaf of a spec."""
    keys = spec.keys(include_nested=True, leaves_only=True)
    return {(key if isinstance(key, tuple) else (key,)): _space_of(key, spec[key]) for key in keys}


def _space_of(key: Any, spec: Any) -> Space:
    shape, dtype = spec.shape, spec.dtype
    try:
        as_numpy = numpy_dtype(dtype)
    except TypeError:
        as_numpy = None
    if as_numpy is None or -1 in shape:
        raise SpaceError(
            f"{key!r}: {type(spec).__name__} of shape {list(shape)} and dtype {dtype} has no fixed "
            "shape, or a dtype that numpy lacks, so no batch can carry it; change or exclude it in "
            "a transform"
        )
    spec = spec.to("cpu")
    if isinstance(spec, Bounded) and dtype.is_floating_point:
        low, high = (bound.expand(shape).numpy() for bound in (spec.space.low, spec.space.high))
        return spaces.Box(low, high, dtype=as_numpy.type)
    if isinstance(spec, Categorical) and not shape and dtype is torch.int64 and spec.space.n > 0:
        return spaces.Discrete(int(spec.space.n))
    return SpecSpace(spec)


def _tree_of(entries: dict[Key, Space]) -> spaces.Dict:
    """A Dict space with these entries, nested as their keys are."""
    branches: dict[str, dict[Key, Space]] = {}
    tree: dict[str, Space] = {}
    for (name, *rest), space in entries.items():
        if rest:
            branches.setdefault(name, {})[tuple(rest)] = space
        else:
            tree[name] = space
    return spaces.Dict({**tree, **{name: _tree_of(part) for name, part in branches.items()}})


@dataclass
class _Part:
    """One env and the rows that it steps.

    Attributes:
        rows: one, or all that it is batched over.
        env: steps them.
        make: makes it anew, None if nothing does.
        root: what the env gave last and is given with the next actions, ``[n]`` or ``[]``.
        failed: it raised and has no successor yet.
        closed: it is closed.
    """

    rows: range
    env: TorchRLEnv
    make: Callable[[], TorchRLEnv] | None
    root: TensorDictBase
    failed: bool = False
    closed: bool = False

    @property
    def place(self) -> slice:
        """Its rows within arrays of all rows."""
        return slice(self.rows.start, self.rows.stop)


class TorchRLBatch(EnvBatch):
    """TorchRL envs, stepped one after the other: plain ones, or a single batched one."""

    def __init__(
        self,
        envs: Sequence[TorchRLEnv],
        makers: Sequence[Callable[[], TorchRLEnv] | None],
    ) -> None:
        """Reset the envs; ``makers``: what makes each of them anew, None where nothing does."""
        self._parts: list[_Part] = []
        all_specs: list[_Specs] = []
        start = 0
        for env, make in zip(envs, makers, strict=True):
            _check(env)
            num_rows = env.batch_size.numel()
            part = _Part(range(start, start + num_rows), env, make, root=None)
            self._parts.append(part)
            start += num_rows
            with self._naming_env("reset", part.rows.start), _ordinary_tensors():
                part.root = env.reset()
            all_specs.append(_Specs.of(env, part.root))
            _check_alike(_name_of(env), all_specs[-1], all_specs[0])
        first = self._specs = all_specs[0]
        super().__init__(
            start, first.observation_space, first.action_space, first.info_space, first.outcomes
        )
        self.can_cut = not any(_resets_itself(part.env) for part in self._parts)
        self._rewards: list[Key] = [("reward",)]
        if ("reward",) not in _entries_of(envs[0].full_reward_spec):
            self._rewards = list(_entries_of(envs[0].full_reward_spec))

    def reset(self, seeds: Sequence[int] | None = None) -> None:
        for part in self._parts:
            try:
                self._start(part, None if seeds is None else int(seeds[part.rows.start]))
            except EnvError as error:
                self._note(part, error, stepped=False)
        if self._faults:
            raise self._faulted()

    def can_rebuild(self, row: int) -> bool:
        return self._part_of(row).make is not None

    def rebuild(self, rows: Sequence[int], seeds: Sequence[int] | None = None) -> None:
        part = self._part_of(rows[0])
        assert part.make is not None
        _shut(part)
        part.env = part.make()
        part.closed = part.failed = False
        seed = None if seeds is None else int(seeds[0])
        if part.env.batch_size.numel() != len(rows):
            raise EnvError(
                f"{self._name(rows[0])}: made anew, it has batch_size {list(part.env.batch_size)}"
            )
        self._start(part, seed, check=True)

    def _part_of(self, row: int) -> _Part:
        return next(part for part in self._parts if row in part.rows)

    def _note(self, part: _Part, error: EnvError, *, stepped: bool) -> None:
        part.failed = True
        self._faults.append(Fault(tuple(part.rows), error, stepped))

    def _start(self, part: _Part, seed: int | None, *, check: bool = False) -> None:
        """Reset all rows of an env."""
        with self._naming_env("reset", part.rows.start), _ordinary_tensors():
            if seed is not None:
                part.env.set_seed(seed)
            part.root = part.env.reset()
        if check:
            _check_alike(self._name(part.rows.start), _Specs.of(part.env, part.root), self._specs)
        self._put(part, self.obs, part.root, "reset")

    def _advance(self, action: Arrays, rows: Sequence[int] | None) -> Step:
        result = self._result
        if rows is None:
            result.terminated.fill(False)
            result.truncated.fill(False)
        for part in self._parts:
            if rows is not None and part.rows.start not in rows:
                continue
            try:
                with self._naming_env("step", part.rows.start), _ordinary_tensors():
                    self._step(part, action)
            except EnvError as error:
                self._note(part, error, stepped=False)
        result.ended[:] = np.flatnonzero(result.terminated | result.truncated).tolist()
        return result

    def _step(self, part: _Part, action: Arrays) -> None:
        env, root, place = part.env, part.root, part.place
        for leaf in self.action_leaves:
            # A copy: the collector uses the memory again.
            tensor = torch.tensor(action[leaf.key][place], dtype=leaf.dtype, device=env.device)
            root.set(leaf.key, tensor.reshape((*env.batch_size, *leaf.shape)))
        stepped = env.step(root)
        after = stepped.get("next")
        part.root = env.step_mdp(stepped)
        self._put(part, self.obs, after, "step")
        if self.outcomes:
            self._put(part, self.outcomes, after, "step")
        result, num_rows = self._result, len(part.rows)
        rewards = [_array(after.get(key)).reshape(num_rows, -1) for key in self._rewards]
        flags = {name: _array(after.get(name)).reshape(num_rows) for name in _DONE if name in after}
        done, terminated = flags["done"], flags["terminated"]
        result.reward[place] = sum(each.sum(-1) for each in rewards)
        result.terminated[place] = terminated
        # Also where it is done and doesn't say why.
        result.truncated[place] = flags.get("truncated", False) | (done & ~terminated)

    def _reset_rows(self, rows: list[int]) -> None:
        for part in self._parts:
            mine = [row - part.rows.start for row in rows if row in part.rows]
            if not mine or part.failed:
                continue
            try:
                with self._naming_env("reset", part.rows.start), _ordinary_tensors():
                    mask = torch.zeros_like(part.root.get("done"))
                    mask.view(len(part.rows), -1)[mine] = True
                    part.root.set("_reset", mask)
                    part.root = part.env.reset(part.root, select_reset_only=True)
                self._put(part, self.obs, part.root, "reset", mine)
            except EnvError as error:
                self._note(part, error, stepped=True)

    def _put(
        self,
        part: _Part,
        into: Arrays,
        values: TensorDictBase,
        call: str,
        rows: list[int] | None = None,
    ) -> None:
        """Write what an env gave to its rows, or to some of them, counted from its first."""
        for key, array in into.items():
            value = values.get(key)
            expected = (*part.env.batch_size, *array.shape[1:])
            if value is None or value.shape != expected:
                got = "nothing" if value is None else f"shape {list(value.shape)}"
                raise EnvError(
                    f"{self._name(part.rows.start)}: {call}() gave {got} for {'.'.join(key)!r}, "
                    f"its spec says {list(expected)}"
                )
            mine = array[part.place]
            given = _array(value).reshape(mine.shape)
            if rows is None:
                mine[:] = given
            else:
                mine[rows] = given[rows]

    def call(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        results: list[Any] = []
        for part in self._parts:
            with self._naming_env(name, part.rows.start):
                result = called(getattr(part.env, name), args, kwargs)
            # Those of TorchRL that step several envs ask each of them.
            is_each = isinstance(result, list) and len(result) == len(part.rows) > 1
            results.extend(result if is_each else [result])
        return results

    def close(self) -> None:
        with contextlib.ExitStack() as closing:  # goes through all, whichever of them raise
            for part in reversed(self._parts):
                if part.failed:
                    _shut(part)
                elif not part.env.is_closed:
                    closing.enter_context(self._naming_env("close", part.rows.start))
                    closing.callback(part.env.close)

    def _name(self, row: int = 0) -> str:
        return f"env {row} ({_name_of(self._part_of(row).env)})"


def _check(env: TorchRLEnv) -> None:
    """Raise if the frames of an env can't be told, or not truly."""
    if len(env.batch_size) > 1 or ("done",) not in _entries_of(env.full_done_spec):
        raise SpaceError(
            f"{_name_of(env)}: its batch_size is {list(env.batch_size)} and its done keys are "
            f"{env.done_keys}; it must have one dimension at most, and a 'done' for each row as a "
            "whole"
        )
    within = vars(_base_of(env)).get("_env")
    if isinstance(within, VectorEnv):
        mode = within.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP)
        if AutoresetMode(mode) is AutoresetMode.NEXT_STEP:
            raise ArgumentError(
                f"{_name_of(env)} wraps a vector env that resets itself a step late, from which "
                "TorchRL gets no final observations: use a ParallelEnv or SerialEnv of single "
                "ones, give the vector env itself, or make it with autoreset_mode=DISABLED"
            )


def _check_alike(name: str, specs: _Specs, others: _Specs) -> None:
    if specs != others:
        raise SpaceError(f"{name} has other specs than its like: {specs} instead of {others}")


@contextlib.contextmanager
def _ordinary_tensors() -> Iterator[None]:
    """An env keeps tensors, which those of inference mode, that policies run in, would spoil."""
    with torch.inference_mode(mode=False), torch.no_grad():
        yield


def _array(tensor: torch.Tensor) -> Any:
    return tensor.cpu().numpy() if tensor.is_cuda else tensor.numpy()


def _resets_itself(env: TorchRLEnv) -> bool:
    """Whether rows can be reset only when they end."""
    while isinstance(env, TransformedEnv):
        transforms = env.transform if isinstance(env.transform, Compose) else [env.transform]
        if any(isinstance(transform, _RESETS_ITSELF) for transform in transforms):
            return True
        env = env.base_env
    return False


def _base_of(env: TorchRLEnv) -> TorchRLEnv:
    while isinstance(env, TransformedEnv):
        env = env.base_env
    return env


def _name_of(env: TorchRLEnv) -> str:
    return type(_base_of(env)).__name__


def _shut(part: _Part) -> None:
    """Close an env that raised, whatever it says to that, and leave no process of it behind."""
    if part.closed:
        return
    part.closed = True
    # First, as a ParallelEnv would wait for an answer of each.
    for process in vars(_base_of(part.env)).get("_workers", ()):
        with contextlib.suppress(ValueError):  # it has seen to this one itself
            process.kill()
            process.join()
    with contextlib.suppress(Exception):
        part.env.close()
