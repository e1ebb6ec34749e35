"""Real envs give the same values through the package as through Gymnasium."""

from __future__ import annotations

from typing import Any

import ale_py
import gymnasium as gym
import numpy as np
import pytest
from helpers.env_contract import batch_of, sample

from distcollect.common.seeding import env_seed


def assert_same_as_sync_vector_env(env_id: str, num_steps: int) -> None:
    n = 2
    reference: Any = gym.make_vec(
        env_id, n, vectorization_mode="sync", vector_kwargs={"autoreset_mode": "SameStep"}
    )
    with batch_of(env_id, n) as batch:
        batch.reset([3, 4])
        obs, _ = reference.reset(seed=[3, 4])
        for _ in range(num_steps):
            assert (batch.obs["observation",] == obs).all()
            action = sample(batch)
            obs, reward, terminated, truncated, infos = reference.step(action["action",])
            result = batch.step(action)
            assert (result.reward == reward.astype(np.float32)).all()
            assert (result.terminated == terminated).all()
            assert (result.truncated == truncated).all()
            for row in result.ended:
                assert (batch.final["observation",][row] == infos["final_obs"][row]).all()
        assert batch.obs["observation",].dtype == reference.observation_space.dtype
    reference.close()


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1", "FrozenLake-v1", "Hopper-v5"])
def test_plain_envs_give_what_gymnasium_gives(env_id: str) -> None:
    assert_same_as_sync_vector_env(env_id, 300)


def test_every_seed_suits_native_envs() -> None:
    with batch_of(ale_py.AtariVectorEnv("pong", 2), 2) as batch:
        for seed in range(20):
            batch.reset([env_seed(seed, index) for index in range(2)])
