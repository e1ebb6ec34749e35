"""What TorchRL's ``GymWrapper`` does in a step, in less time.

This module imports torchrl, and uses private parts of it. An env for which they are not as expected
is stepped by its own method.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Categorical, OneHot
from torchrl.envs import GymWrapper

TorchRLEnv: TypeAlias = Any  # torchrl.envs.EnvBase, which has no types

# An env that overrides one of these is stepped by its own method.
_KNOWN = (
    "_step",
    "read_action",
    "read_obs",
    "_read_obs_eager",
    "read_reward",
    "_read_reward_eager",
    "read_done",
    "_is_batched",
)
# What this package uses to make steps of its own. An env is stepped by its own method without them.
_PARTS_OF_TENSORDICT = ("_get_str", "_new_unsafe", "_set_str")
_FLAGS = {"done", "terminated", "truncated"}
_MADE_AT_ONCE = 64 * len(_FLAGS)


def has_methods_of(env: TorchRLEnv, kind: type, names: Iterable[str]) -> bool:
    """Whether an env has the methods of this class: no class below overrides them."""
    own = vars(env)
    return isinstance(env, kind) and all(
        name not in own
        and inspect.getattr_static(type(env), name, None)
        is inspect.getattr_static(kind, name, None)
        for name in names
    )


def tensordict_has_parts() -> bool:
    """Whether this version of TensorDict has the private methods that faster steps use."""
    return all(hasattr(TensorDict, name) for name in _PARTS_OF_TENSORDICT)


def is_usual_gym_env(env: TorchRLEnv) -> bool:
    """Whether :class:`GymStep` can make the steps of the env."""
    return (
        has_methods_of(env, GymWrapper, _KNOWN)
        and isinstance(vars(env).get("_env"), gym.Env)
        and getattr(env, "validated", False) is not False
        and not env._is_batched
        and not env.info_dict_reader
        and env.wrapper_frame_skip == 1
        and bool(getattr(env, "_convert_actions_to_numpy", False))
        and len(env.action_keys) == len(env.reward_keys) == 1
        and {*env.full_done_spec.keys()} == _FLAGS
        and env.device in (None, torch.device("cpu"))
    )


class GymStep:
    """``_step`` of an env with :func:`is_usual_gym_env`.

    The first step is compared with what TorchRL makes of it. If they differ, the env's own method
    makes all later steps.
    """

    def __init__(self, env: TorchRLEnv) -> None:
        self._env = env
        self._inner = env._env
        self._is_checked = False
        self._is_fast = True
        self._device, self._batch_size = env.device, env.batch_size
        [self._action_key], [self._reward_key] = env.action_keys, env.reward_keys
        self._action_spec = env.full_action_spec[self._action_key]
        self._is_number = isinstance(self._action_spec, (OneHot, Categorical))
        self._encode_reward = env.reward_spec.encode
        self._observation_key, spec = next(iter(env.observation_spec.items(True, True)))
        self._encode_observation = spec.encode
        self._false: list[torch.Tensor] = []

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        """One transition; see ``EnvBase._step``."""
        given = td.get(self._action_key)
        if not self._is_checked and isinstance(given, torch.Tensor):
            self._is_fast = _is_equal(self._read_action(given), self._env.read_action(given))
        if not self._is_fast or not isinstance(given, torch.Tensor):
            stepped: TensorDictBase = self._env._step(td)
            return stepped
        result = self._env._output_transform(self._inner.step(self._read_action(given)))
        observation, reward, terminated, truncated, done, _ = result
        is_usual = (
            type(terminated) is type(truncated) is type(done) is bool
            and reward is not None
            and isinstance(observation, np.ndarray)
        )
        if not is_usual:
            return self._as_torchrl_reads(result)
        entries: dict[Any, torch.Tensor] = {
            self._observation_key: self._encode_observation(observation, ignore_device=True),
            self._reward_key: self._encode_reward(0 + reward, ignore_device=True),
            "truncated": self._flag(truncated),
            "done": self._flag(done),
            "terminated": self._flag(terminated),
        }
        made: TensorDict = TensorDict._new_unsafe(
            entries, batch_size=self._batch_size, device=self._device
        )
        return made if self._is_checked else self._checked(made, self._as_torchrl_reads(result))

    def _read_action(self, given: Any) -> Any:
        action = self._action_spec.to_numpy(given, safe=False)
        return int(action) if self._is_number and action.size == 1 else action

    def _flag(self, is_true: bool) -> torch.Tensor:
        if not self._false:
            # Making one at a time takes six times as long.
            self._false = list(torch.zeros((_MADE_AT_ONCE, 1), dtype=torch.bool).unbind())
        flag = self._false.pop()
        return flag.fill_(True) if is_true else flag

    def _as_torchrl_reads(self, result: Any) -> TensorDict:
        env = self._env
        observation, reward, terminated, truncated, done, _ = result
        terminated, truncated, done, _ = env.read_done(
            terminated=terminated, truncated=truncated, done=done
        )
        entries = {
            **env.read_obs(observation),
            self._reward_key: env.read_reward(0 if reward is None else 0 + reward),
            "truncated": truncated,
            "done": done,
            "terminated": terminated,
        }
        return TensorDict(entries, self._batch_size, self._device)

    def _checked(self, made: TensorDict, theirs: TensorDict) -> TensorDict:
        self._is_checked = True
        self._is_fast = {*made.keys()} == {*theirs.keys()} and all(
            _is_equal(value, theirs.get(name)) for name, value in made.items()
        )
        return theirs


def _is_equal(one: Any, other: Any) -> bool:
    """Whether two values have the same type and are equal."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype is other.dtype and torch.equal(one, other)
    return type(one) is type(other) and np.array_equal(one, other)
