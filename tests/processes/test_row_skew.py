"""Rows that drift apart lose frames: what is left of such an episode counts as no whole one."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from benchmarks.uneven_pool import UnevenPool
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from helpers.loopback_pool import loopback_collector

import distcollect as dc

LENGTHS = ((3, 4), (1, 30), (40,))  # of the episodes in each row, in turn


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


def native() -> Any:
    return Native(*LENGTHS)


def in_processes() -> Any:
    rows = [partial(Row, row, lengths) for row, lengths in enumerate(LENGTHS)]
    return AsyncVectorEnv(rows, shared_memory=False)


SETTINGS: dict[str, Any] = {"frames_per_batch": 8 * len(LENGTHS), "policy": None}


WORKERS: dict[str, Any] = {"num_workers": 2, "policy": None}
MAKERS: dict[str, Callable[..., Any]] = {
    "in process": partial(dc.SyncDataCollector, native, **SETTINGS),
    "in process, with subprocesses": partial(dc.SyncDataCollector, in_processes, **SETTINGS),
    "sync": partial(loopback_collector, native, sync=True, frames_per_batch=48, **WORKERS),
    "async": partial(loopback_collector, native, sync=False, frames_per_batch=24, **WORKERS),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_every_whole_trajectory_begins_at_a_reset(kind: str) -> None:
    seen = set()
    with MAKERS[kind](trajs_per_batch=12) as collector:
        for _ in range(8):
            batch = collector.next()
            for trajectory in batch.unbind(0):
                real = trajectory[trajectory["collector", "mask"]]
                row, episode, _ = real["observation"][0].tolist()
                lengths = LENGTHS[int(row)]
                whole = list(range(lengths[int(episode) % len(lengths)]))
                assert real["observation"][:, 2].tolist() == whole
                assert real["next", "done"].sum() == real["next", "done"][-1] == 1
                seen.add((int(row), len(real)))
        assert collector.abandoned_frames > 0
        assert collector.stats().lost["row_skew"] > 0
    assert {(0, 3), (0, 4), (1, 1)} <= seen
    if kind != "async":
        assert (2, 40) not in seen, "this row is ahead of the others, and loses frames in each"


@pytest.mark.parametrize("make_env", [native, in_processes])
def test_statistics_have_whole_episodes_only(make_env: Any) -> None:
    lengths: list[int] = []
    with dc.SyncDataCollector(make_env, **SETTINGS) as collector:
        expected = whole = 0
        parts: dict[int, list[Any]] = {}
        for _ in range(60):
            batch = collector.next()
            for row in batch.unbind(0):
                for frame in row.unbind(0):
                    parts.setdefault(int(frame["collector", "traj_ids"]), []).append(frame)
                    if frame["next", "done"]:
                        frames = parts[int(frame["collector", "traj_ids"])]
                        whole += 1
                        if frames[0]["observation"][2] == 0:
                            expected += 1
                            lengths.append(len(frames))
        episodes = collector.stats().episodes
    assert 100 < expected < whole
    assert episodes.count == expected
    assert episodes.mean_length == episodes.mean_return == np.mean(lengths[-100:])


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


class Clock:
    """Time that passes when somebody sleeps."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.filterwarnings("ignore:.*precision lowered by casting:UserWarning")
@pytest.mark.parametrize("num_ready", [2, 3])
def test_whole_trajectories_of_an_asynchronous_pool(num_ready: int) -> None:
    """In sync mode, what its envs made ahead is dropped."""
    envpool = pytest.importorskip("envpool", reason="EnvPool is not installed")
    longest = 5  # of CartPole's episodes, none of which is shorter

    def make_pool() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pool = envpool.make_gymnasium(
                "CartPole-v1", num_envs=4, batch_size=num_ready, max_episode_steps=longest
            )
        clock, times = Clock(), itertools.cycle([1.0, 1.7, 0.3, 2.9, 1.1])
        UnevenPool(pool, lambda row: (row + 1) * next(times), clock=clock, sleep=clock.sleep)
        return pool

    settings: dict[str, Any] = {"frames_per_batch": 4 * 7, "policy": None}
    with dc.SyncDataCollector(make_pool, trajs_per_batch=20, **settings) as collector:
        for _ in range(5):
            batch = collector.next()
            assert batch["collector", "mask"].sum(-1).tolist() == [longest] * 20
            assert (batch["observation"][:, 0].abs() <= 0.05).all(), "not an episode's first"
            collector.update_policy_weights_()
        assert collector.stats().episodes.mean_length == longest
        assert collector.stats().lost["row_skew"] > 0
