"""The specs of TorchRL envs as spaces and leaves. This module imports torchrl."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDictBase
from torchrl.data import Bounded, Categorical, Composite

from distcollect.envs.base import Space
from distcollect.errors import SpaceError
from distcollect.rollout.spaces import Entries, Key, Leaf, leaves_of, numpy_dtype

DONE = ("done", "terminated", "truncated")


class SpecSpace(gym.Space[Any]):
    """The space of a spec for which Gymnasium has no space, for example of one-hot actions."""

    def __init__(self, spec: Any) -> None:
        super().__init__(tuple(spec.shape), numpy_dtype(spec.dtype))
        self._spec = spec

    def sample(self, mask: Any = None, probability: Any = None) -> np.ndarray:
        """Draw a value; the state of torch's global generator, which specs use, is restored."""
        state = torch.get_rng_state()
        try:
            torch.default_generator.manual_seed(int(self.np_random.integers(2**63)))
            drawn: np.ndarray = self._spec.rand().numpy()
            return drawn
        finally:
            torch.set_rng_state(state)

    def contains(self, x: Any) -> bool:
        """Whether the spec contains this value."""
        return bool(self._spec.is_in(torch.as_tensor(x)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SpecSpace) and bool(self._spec == other._spec)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self._spec).__name__}{list(self._spec.shape)}"


@dataclass(frozen=True)
class Specs:
    """An env's specs as spaces and leaves of a single row.

    Attributes:
        observation_space: the entry "observation" if there is one, else a Dict of all entries.
        info_space: the other entries, and done flags of parts of the env (for example agents).
        action_space: of all actions.
        outcomes: leaves that a step gives and a reset does not, except the env's own reward.
    """

    observation_space: Space
    info_space: spaces.Dict
    action_space: Space
    outcomes: tuple[Leaf, ...]

    @classmethod
    def of(cls, env: Any, first: TensorDictBase) -> Specs:
        """The specs of ``env``.

        Args:
            env: a TorchRL env.
            first: what its reset returned.

        Raises:
            SpaceError: no batch can carry the values of a spec.
        """
        given = entries_of(env.full_observation_spec_unbatched)
        given |= {
            key: space
            for key, space in entries_of(env.full_done_spec_unbatched).items()
            if key not in [(name,) for name in DONE]
        }
        always = {key: space for key, space in given.items() if first.get(key) is not None}
        single = always.pop(("observation",), None)
        observation_space, info_space = single, _tree_of(always)
        if observation_space is None:
            observation_space, info_space = info_space, spaces.Dict()
        actions = entries_of(env.full_action_spec_unbatched)
        action_space = actions.get(("action",))
        if action_space is None or len(actions) > 1:
            action_space = Entries(_tree_of(actions).spaces)
        at_the_end = {key: space for key, space in given.items() if first.get(key) is None}
        rewards = entries_of(env.full_reward_spec_unbatched)
        reward = rewards.pop(("reward",), None)
        if reward is not None and np.prod(reward.shape or ()) != 1:
            raise SpaceError(
                f"the env's reward has shape {list(reward.shape or ())} instead of [1]: combine "
                "its parts into one number in a transform; the parts may stay under another key"
            )
        outcomes = leaves_of(_tree_of({**at_the_end, **rewards}), "observation")
        return cls(observation_space, info_space, action_space, outcomes)

    def difference_from(self, other: Specs) -> str:
        """Why one batch can't hold frames of both; "" if it can."""
        for mine, theirs in (
            (self.observation_space, other.observation_space),
            (self.info_space, other.info_space),
        ):
            # The bounds of observations may differ; action spaces must be equal.
            if leaves_of(mine, "observation") != leaves_of(theirs, "observation"):
                return f"observations of {mine} instead of {theirs}"
        if self.action_space != other.action_space:
            return f"actions of {self.action_space} instead of {other.action_space}"
        if self.outcomes != other.outcomes:
            mine_next, their_next = (", ".join(map(str, s.outcomes)) for s in (self, other))
            return f"under 'next' {mine_next or 'nothing else'} instead of {their_next}"
        return ""


def entries_of(spec: Composite) -> dict[Key, Space]:
    """The space of each leaf of a spec."""
    keys = spec.keys(include_nested=True, leaves_only=True)
    return {(key if isinstance(key, tuple) else (key,)): _space_of(key, spec[key]) for key in keys}


def _space_of(key: Any, spec: Any) -> Space:
    shape, dtype = spec.shape, spec.dtype
    try:
        as_numpy = numpy_dtype(dtype) if isinstance(dtype, torch.dtype) else None
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
    """A Dict space with these entries, nested like their keys."""
    branches: dict[str, dict[Key, Space]] = {}
    tree: dict[str, Space] = {}
    for (name, *rest), space in entries.items():
        if rest:
            branches.setdefault(name, {})[tuple(rest)] = space
        else:
            tree[name] = space
    return spaces.Dict({**tree, **{name: _tree_of(part) for name, part in branches.items()}})
