"""Native vector envs give every frame that a loop over the same env gives, and no filler."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import ale_py
import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from helpers.env_contract import batch_of
from tensordict import TensorDictBase

import distcollect as dc
from distcollect.common.seeding import env_seed

# Raised by Gymnasium when EnvPool makes its spaces.
pytestmark = pytest.mark.filterwarnings("ignore:.*precision lowered by casting:UserWarning")

N = 4


def envpool_env(task: str, **kwargs: Any) -> Any:
    envpool = pytest.importorskip("envpool", reason="EnvPool is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return envpool.make_gymnasium(task, num_envs=N, num_threads=2, seed=[3, 5, 7, 9], **kwargs)


def atari_env(mode: AutoresetMode) -> Any:
    return ale_py.AtariVectorEnv(
        "pong",
        N,
        img_height=12,
        img_width=12,
        num_threads=1,
        noop_max=1,
        use_fire_reset=False,
        max_num_frames_per_episode=60,
        autoreset_mode=mode,
    )


ENVS: dict[str, Callable[[], Any]] = {
    "envpool-cartpole": lambda: envpool_env("CartPole-v1"),
    "envpool-short": lambda: envpool_env("CartPole-v1", max_episode_steps=5),
    "envpool-float64": lambda: envpool_env("HalfCheetah-v4", max_episode_steps=6),
    "envpool-dict": lambda: envpool_env("CheetahRun-v1", max_episode_steps=6),
    "ale-next": lambda: atari_env(AutoresetMode.NEXT_STEP),
    "ale-same": lambda: atari_env(AutoresetMode.SAME_STEP),
}


def choose(space: gym.Space[Any], obs: Any) -> np.ndarray:
    """Actions that follow from the observations of some rows, and differ between them."""
    parts = [obs] if isinstance(obs, np.ndarray) else [obs[key] for key in sorted(obs)]
    sums = sum(part.reshape(len(part), -1).astype(np.float64).sum(-1) for part in parts)
    if isinstance(space, gym.spaces.Discrete):
        return (np.floor(np.abs(sums) * 1000) % space.n).astype(space.dtype)
    return np.broadcast_to(np.sin(sums)[:, None], (len(sums), *space.shape)).astype(space.dtype)


class Chooser:
    """The same as a policy."""

    def __init__(self, space: gym.Space[Any], keys: list[str]) -> None:
        self.space = space
        self.keys = keys

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        obs: Any = {key: td[key].numpy() for key in self.keys}
        is_tree = self.keys != ["observation"]
        td["action"] = torch.from_numpy(choose(self.space, obs if is_tree else obs["observation"]))
        return td


def flat(obs: Any, row: int) -> list[np.ndarray]:
    parts = [obs] if isinstance(obs, np.ndarray) else [obs[key] for key in sorted(obs)]
    return [part[row].copy() for part in parts]


def frames_of_a_loop(env: Any, num_steps: int) -> list[list[tuple[Any, ...]]]:
    """Each row's transitions, as they come from the env's own ``step`` with its own resets."""
    is_same_step = env.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    frames: list[list[tuple[Any, ...]]] = [[] for _ in range(N)]
    obs, _ = env.reset()
    over = np.zeros(N, bool)
    for _ in range(num_steps):
        action = choose(env.single_action_space, obs)
        following, reward, terminated, truncated, infos = env.step(action)
        for row in np.flatnonzero(~over):
            ends = is_same_step and (terminated | truncated)[row]
            last = infos["final_obs"] if ends else following
            frames[row].append(
                (
                    *flat(obs, row),
                    *flat(last, row),
                    action[row],
                    np.float32(reward[row]),
                    terminated[row],
                    truncated[row],
                )
            )
        over = (terminated | truncated) & (not is_same_step)
        obs = following
    env.close()
    return frames


def frames_of(batches: list[TensorDictBase], keys: list[str]) -> list[list[tuple[Any, ...]]]:
    frames: list[list[tuple[Any, ...]]] = [[] for _ in range(N)]
    for batch in batches:
        columns = [batch[key].numpy() for key in keys]
        columns += [batch["next", key].numpy() for key in keys]
        columns.append(batch["action"].numpy())
        columns += [
            batch["next", name][..., 0].numpy() for name in ("reward", "terminated", "truncated")
        ]
        for row in range(N):
            for step in range(batch.shape[1]):
                frames[row].append(tuple(column[row, step] for column in columns))
    return frames


def collector_of(name: str, steps: int, **kwargs: Any) -> tuple[dc.SyncDataCollector, list[str]]:
    env = ENVS[name]()
    space = env.single_observation_space
    keys = sorted(space) if isinstance(space, gym.spaces.Dict) else ["observation"]
    policy = Chooser(env.single_action_space, keys)
    return dc.SyncDataCollector(env, policy, frames_per_batch=N * steps, **kwargs), keys


def test_every_seed_suits_the_envs_of_ale() -> None:
    with batch_of(ale_py.AtariVectorEnv("pong", 2), 2) as batch:
        for seed in range(6):
            batch.reset([env_seed(seed, index) for index in range(2)])


@pytest.mark.parametrize("steps", [1, 32])
@pytest.mark.parametrize("name", ENVS)
def test_each_frame_that_a_loop_gives_and_no_other(name: str, steps: int) -> None:
    collector, keys = collector_of(name, steps)
    with collector:
        batches = [collector.next() for _ in range(64 // steps)]
        assert not collector.stats().lost, "each frame that was stepped is delivered"
    expected = frames_of_a_loop(ENVS[name](), 96)
    num_ends = 0
    for mine, its in zip(frames_of(batches, keys), expected, strict=True):
        assert len(mine) <= len(its)
        for one, other in zip(mine, its, strict=False):
            for value, wanted in zip(one, other, strict=True):
                assert np.array_equal(value, wanted)
                assert value.dtype == wanted.dtype
            num_ends += one[-1] or one[-2]
    assert num_ends >= N


@pytest.mark.parametrize("name", ENVS)
def test_rows_can_be_cut_and_reset_at_once(name: str) -> None:
    collector, keys = collector_of(name, 12, max_frames_per_traj=3, reset_at_each_iter=True)
    with collector:
        batches = [collector.next() for _ in range(3)]
    for batch in batches:
        ids = batch["collector", "traj_ids"]
        assert all(np.unique(row, return_counts=True)[1].max() <= 3 for row in ids.numpy())
        done = batch["next", "done"][..., 0]
        assert torch.equal(ids[:, 1:] != ids[:, :-1], done[:, :-1])
        for key in keys:
            follows = batch["next", key][:, :-1] == batch[key][:, 1:]
            assert follows.flatten(2).all(-1)[~done[:, :-1]].all()
    assert len({int(i) for batch in batches for i in batch["collector", "traj_ids"].unique()}) >= 48
