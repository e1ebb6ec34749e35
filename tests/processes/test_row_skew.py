"""Rows that drift apart lose frames: what is left of such an episode counts as no whole one."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

import distcollect as dc


class Row(gym.Env[np.ndarray, int]):
    """Observes (row, episode, frame); each frame gives a reward of 1."""

    observation_space = gym.spaces.Box(-1, 1e6, (3,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, row: int, lengths: tuple[int, ...]) -> None:
        self._row, self._lengths, self._episode, self._frame = row, lengths, -1, 0

    def _seen(self) -> np.ndarray:
        return np.array([self._row, self._episode, self._frame], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._episode, self._frame = self._episode + 1, 0
        return self._seen(), {}

    def step(self, action: int) -> Any:
        self._frame += 1
        over = self._frame == self._lengths[self._episode % len(self._lengths)]
        return self._seen(), 1.0, over, False, {}


class Native(gym.vector.VectorEnv[Any, Any, Any]):
    """A vector env with filler steps, which takes no reset mask."""

    def __init__(self, *lengths: tuple[int, ...]) -> None:
        self._rows = SyncVectorEnv([partial(Row, row, each) for row, each in enumerate(lengths)])
        self.num_envs = len(lengths)
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.single_observation_space = self._rows.single_observation_space
        self.single_action_space = self._rows.single_action_space
        self.observation_space = self._rows.observation_space
        self.action_space = self._rows.action_space

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return self._rows.reset(seed=seed, options=options)

    def step(self, actions: Any) -> Any:
        return self._rows.step(actions)


def test_an_evaluation_counts_no_rest_of_an_episode() -> None:
    """Row 1 makes twice as many frames, and loses some right after the end of an episode."""
    make_env = partial(Native, (1,), (32,))
    with dc.SyncDataCollector(make_env, policy=None, frames_per_batch=16) as collector:
        evaluation = collector.evaluate(16)
    assert sorted(evaluation.lengths.tolist()) == [1] * 8 + [32] * 8
    assert evaluation.returns.tolist() == evaluation.lengths.tolist()


def test_an_evaluation_has_episodes_that_are_much_longer_than_those_of_other_rows() -> None:
    make_env = partial(Native, (1,), (400,))
    with dc.SyncDataCollector(make_env, policy=None, frames_per_batch=16) as collector:
        evaluation = collector.evaluate(4, timeout_s=20)
    assert sorted(evaluation.lengths.tolist()) == [1, 1, 400, 400]


class FramesOfHalves(AsyncVectorEnv):
    """Gives as the reward how many frames a row has since its reset, which it counts itself."""

    def reset_wait(self, *args: Any, **kwargs: Any) -> Any:
        self._counts = np.zeros(self.num_envs)
        return super().reset_wait(*args, **kwargs)

    def step_wait(self, *args: Any, **kwargs: Any) -> Any:
        observations, _, *others = super().step_wait(*args, **kwargs)
        self._counts += 1
        self._counts[observations[:, 2] == 0] = 0
        return observations, self._counts.copy(), *others


def test_state_in_the_halves_of_a_vector_env_s_calls() -> None:
    rows = [partial(Row, row, lengths) for row, lengths in enumerate(((3,), (5,)))]
    with dc.SyncDataCollector(lambda: FramesOfHalves(rows), None, frames_per_batch=16) as each:
        batch = each.next()
    assert (batch["next", "reward"][..., 0] == batch["next", "observation"][..., 2]).all()
