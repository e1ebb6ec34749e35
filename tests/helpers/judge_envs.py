"""Gymnasium's envs of every kind, whose rows number their frames (:mod:`helpers.judge_truth`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space
from helpers.judge_truth import FACTS, LARGEST, NUM_ACTIONS, Row, Script

OBSERVATION = gym.spaces.Box(-1, LARGEST, (len(FACTS),), np.int64)
ACTION = gym.spaces.Discrete(NUM_ACTIONS)
MODES = {
    "next": AutoresetMode.NEXT_STEP,
    "same": AutoresetMode.SAME_STEP,
    "disabled": AutoresetMode.DISABLED,
}


class NumberedEnv(gym.Env[Any, Any]):
    observation_space, action_space = OBSERVATION, ACTION

    def __init__(self, row: Row) -> None:
        self._row = row

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self._row.reset(), {}

    def step(self, action: Any) -> Any:
        return *self._row.step(action), {}


class NativeEnv(VectorEnv[Any, Any, Any]):
    """A vector env of its own kind. Only in the mode DISABLED it can reset single rows."""

    single_observation_space, single_action_space = OBSERVATION, ACTION

    def __init__(self, rows: list[Row], mode: AutoresetMode) -> None:
        self._rows, self.num_envs, self._mode = rows, len(rows), mode
        self.observation_space = batch_space(OBSERVATION, self.num_envs)
        self.action_space = batch_space(ACTION, self.num_envs)
        self.metadata = {"autoreset_mode": mode}
        self._over = np.zeros(self.num_envs, bool)
        self._seen = np.zeros((self.num_envs, len(FACTS)), np.int64)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        mask = np.ones(self.num_envs, bool)
        if self._mode is AutoresetMode.DISABLED:
            mask = (options or {}).get("reset_mask", mask)
        for index in np.flatnonzero(mask):
            self._seen[index] = self._rows[index].reset()
            self._over[index] = False
        return self._seen.copy(), {}

    def step(self, actions: Any) -> Any:
        for row, over in zip(self._rows, self._over, strict=True):
            if not over:
                row.raise_if_due()  # before any row is stepped
        rewards = np.zeros(self.num_envs)
        ends = np.zeros((2, self.num_envs), bool)
        infos: dict[str, Any] = {}
        for index, (row, action) in enumerate(zip(self._rows, actions, strict=True)):
            if self._over[index]:
                assert self._mode is AutoresetMode.NEXT_STEP, "stepped a row that has ended"
                self._seen[index] = row.fill()
                rewards[index] = 777  # no frame: nothing may read it
                continue
            self._seen[index], rewards[index], *ends[:, index] = row.step(action)
            if ends[:, index].any() and self._mode is AutoresetMode.SAME_STEP:
                final = {"final_obs": self._seen[index].copy(), "final_info": {}}
                infos = self._add_info(infos, final, index)
                self._seen[index] = row.reset()
        self._over = ends.any(0) & (self._mode is not AutoresetMode.SAME_STEP)
        return self._seen.copy(), rewards, *ends, infos


class CountsSteps(VectorWrapper[Any, Any, Any, Any, Any]):
    """A user's wrapper with a state of each row, which only a reset of all rows clears at once.

    Its count of steps takes the place of the env's own in the observation. It knows what the mode
    NEXT_STEP means: the step after an episode's end begins a new one.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any]) -> None:
        super().__init__(env)
        self._counts = np.zeros(self.num_envs, np.int64)
        self._over = np.zeros(self.num_envs, bool)

    def _shown(self, observation: Any) -> Any:
        shown = observation.copy()
        shown[:, FACTS.index("step")] = self._counts
        return shown

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        observation, infos = self.env.reset(seed=seed, options=options)
        self._counts[:] = 0
        self._over[:] = False
        return self._shown(observation), infos

    def step(self, actions: Any) -> Any:
        observation, rewards, terminated, truncated, infos = self.env.step(actions)
        self._counts = np.where(self._over, 0, self._counts + 1)
        self._over = terminated | truncated
        return self._shown(observation), rewards, terminated, truncated, infos


class ToTorch(VectorWrapper[Any, Any, Any, Any, Any]):
    """Tensors outside, arrays inside; also in mappings, which it makes anew by their own type.

    Gymnasium's ``NumpyToTorch`` does the same, but needs a package that no extra installs.
    """

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        inner = None if options is None else _converted(options, torch.Tensor, torch.Tensor.numpy)
        given = self.env.reset(seed=seed, options=inner)
        return tuple(_converted(each, np.ndarray, _tensor) for each in given)

    def step(self, actions: Any) -> Any:
        given = self.env.step(_converted(actions, torch.Tensor, torch.Tensor.numpy))
        return tuple(_converted(each, np.ndarray, _tensor) for each in given)


def _tensor(array: np.ndarray) -> Any:
    return array if array.dtype == object else torch.from_numpy(array)


def _converted(value: Any, kind: type, convert: Callable[[Any], Any]) -> Any:
    if isinstance(value, kind):
        return convert(value)
    if isinstance(value, Mapping):
        inner = {name: _converted(each, kind, convert) for name, each in value.items()}
        return type(value)(**inner)
    return value


def _maker(script: Script, row: int, context: Any) -> Callable[[], NumberedEnv]:
    return lambda: NumberedEnv(script.row(context, row))


@dataclass(frozen=True)
class NumberedMaker:
    """Makes an env of a kind, with ``num_rows`` rows; can be pickled."""

    kind: str
    script: Script
    num_rows: int = 1

    def __call__(self, context: Any) -> Any:
        kind, _, mode = self.kind.partition("-")
        mode, _, memory = mode.partition("-")
        rows = range(self.num_rows)
        if kind == "single":
            return NumberedEnv(self.script.row(context, context.env_index))
        if kind == "native":
            return NativeEnv([self.script.row(context, i) for i in rows], MODES[mode])
        makers = [_maker(self.script, i, context) for i in rows]
        if kind == "async":
            # Forked, as Gymnasium does it: TorchRL changes the default when it is imported.
            shared = memory != "pipe"
            make = partial(AsyncVectorEnv, context="fork", shared_memory=shared)
            return make(makers, autoreset_mode=MODES[mode])
        env = SyncVectorEnv(makers, autoreset_mode=MODES[mode])
        wrap: Any = {"sync": lambda env: env, "wrapped": CountsSteps, "torch": ToTorch}[kind]
        return wrap(env)


SINGLE_PROCESS_KINDS = [
    "single",
    *(f"{kind}-{mode}" for kind in ("sync", "native", "torch") for mode in MODES),
    "wrapped-next",
]
SUBPROCESS_KINDS = [f"async-{mode}{memory}" for mode in MODES for memory in ("", "-pipe")]

# Rows of these may drift apart, as their rows can't be reset alone: frames of the faster rows are
# dropped in sync mode, and options that cut episodes may be refused.
DRIFTING = {"native-next", "wrapped-next", "torch-next", "async-next-pipe"}
# These may be unable to cut episodes either.
MAY_REFUSE_CUTS = {*DRIFTING, "native-same", "torch-same"}


def act(observation: torch.Tensor) -> torch.Tensor:
    """A policy that chooses each action by all facts that it sees."""
    uid, episode, step, last = observation.unbind(-1)
    return (uid * 31 + episode * 17 + step * 7 + last * 3 + 5) % NUM_ACTIONS
