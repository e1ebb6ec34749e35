"""Batches of envs as the engine steps them, and what holds for those of every kind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from gymnasium.wrappers import TransformObservation
from gymnasium.wrappers import vector as vector_wrappers
from helpers.counting_envs import (
    CountingMaker,
)
from helpers.versions import version_of

from distcollect.envs.base import EnvBatch
from distcollect.envs.make import EnvContext, make_envs
from distcollect.rollout.spaces import Arrays, flatten

N = 3


def contexts(n: int) -> list[EnvContext]:
    return [EnvContext(worker_id=0, env_index=i, incarnation=0, seed=None) for i in range(n)]


@contextmanager
def batch_of(create_env: Any, n: int = N, **kwargs: Any) -> Iterator[EnvBatch]:
    batch = make_envs(create_env, n, contexts=contexts(n), **kwargs)
    try:
        yield batch
    finally:
        batch.close()


def rows_of(batch: EnvBatch) -> range:
    return range(batch.num_envs)


def sample(batch: EnvBatch) -> Arrays:
    space = batch.action_space
    parts = [list(flatten(space, space.sample())) for _ in rows_of(batch)]
    return {
        leaf.key: np.stack([row[i] for row in parts]).astype(leaf.numpy_dtype)
        for i, leaf in enumerate(batch.action_leaves)
    }


def statistics_of(create_env: Any, num_steps: int) -> None:
    with batch_of(create_env, info_keys=["episode"]) as batch:
        batch.reset()
        returns = np.zeros(batch.num_envs)
        lengths = np.zeros(batch.num_envs, int)
        seen = 0
        for _ in range(num_steps):
            result = batch.step(sample(batch))
            real = np.ones(batch.num_envs, bool) if result.real is None else result.real
            returns += result.reward * real
            lengths += real
            for row in result.ended:
                assert batch.final["episode", "r"][row] == pytest.approx(returns[row])
                assert batch.final["episode", "l"][row] == lengths[row]
                returns[row] = lengths[row] = 0
                seen += 1
            running = [row for row in rows_of(batch) if row not in result.ended]
            assert np.isnan(batch.obs["episode", "r"][running]).all()
            assert not batch.obs["episode", "l"][running].any()
            if (
                batch.supports_partial_reset
            ):  # a row that can't be reset at once still shows its final values
                assert np.isnan(batch.obs["episode", "r"][result.ended]).all()
        assert seen > num_steps // 2
        assert batch.obs["episode", "r"].dtype == np.float32


def check_episode_statistics_of_the_vector_wrapper(kind: str) -> None:
    if "same" in kind and version_of("gymnasium") < (1, 4):
        pytest.skip("Gymnasium's wrapper counts wrongly in SAME_STEP mode before version 1.4")
    env: Any = CountingMaker(kind, N)()
    if "nolabel" in kind:
        warning = "autoreset_mode" if version_of("gymnasium") >= (1, 3) else "todo"
        with pytest.warns(UserWarning, match=warning):
            env = vector_wrappers.RecordEpisodeStatistics(env)
    else:
        env = vector_wrappers.RecordEpisodeStatistics(env)
    statistics_of(env, 20)


def check_wrappers_that_change_live_arrays_in_place(kind: str) -> None:
    # With a reset mask such a wrapper still processes all rows, most of them a second time.
    env: Any = CountingMaker(kind, N, lengths=(2, 5))()
    space = env.single_observation_space
    env = vector_wrappers.VectorizeTransformObservation(
        env, TransformObservation, func=lambda obs: obs + 1000, observation_space=space
    )
    with batch_of(env) as batch:
        batch.reset()
        for _ in range(12):
            batch.step(sample(batch))
            assert (batch.obs["observation",] // 1000 == 1).all()
