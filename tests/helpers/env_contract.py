"""The contract that batches of envs keep, checked with envs whose every value is known."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from gymnasium.wrappers import TransformObservation
from gymnasium.wrappers import vector as vector_wrappers
from helpers.counting_envs import (
    FILLER_KINDS,
    UNCUTTABLE_KINDS,
    CountingMaker,
    Frame,
    check_frames,
)
from helpers.versions import version_of

from distcollect.envs.base import EnvBatch
from distcollect.envs.make import EnvContext, make_envs
from distcollect.errors import ArgumentError, EnvError
from distcollect.rollout.spaces import Arrays, Key, flatten

N = 3
INFO_KEYS = ["lap", "ratio", "flag", "pair", "nest", "stepped", "odd"]
INFO_LEAVES: list[Key] = [("lap",), ("ratio",), ("flag",), ("pair",), ("stepped",), ("odd",)]
INFO_LEAVES += [("nest", "depth"), ("nest", "deeper", "echo")]


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


def drive(batch: EnvBatch, num_steps: int, cut_after: int | None = None) -> list[list[Frame]]:
    """Step with random actions, always in the same memory; returns each row's real frames."""
    frames: list[list[Frame]] = [[] for _ in rows_of(batch)]
    at_start = dict(batch.obs)
    action = sample(batch)
    since = np.zeros(batch.num_envs, int)
    for _ in range(num_steps):
        for key, drawn in sample(batch).items():
            action[key][...] = drawn
        root = {key: array.copy() for key, array in batch.obs.items()}
        taken = {key: array.copy() for key, array in action.items()}
        since += 1
        cut = None if cut_after is None else since >= cut_after
        reward, terminated, truncated, ended, real = batch.step(action, cut)
        assert ended == np.flatnonzero(terminated | truncated).tolist()
        assert reward.dtype == np.float32
        for row in rows_of(batch):
            if real is not None and not real[row]:
                assert row not in ended
                continue
            after = batch.final if row in ended else batch.obs
            frames[row].append(
                Frame(
                    {key: array[row].copy() for key, array in root.items()},
                    {key: array[row] for key, array in taken.items()},
                    reward[row],
                    {key: array[row].copy() for key, array in after.items()},
                    terminated[row],
                    truncated[row],
                )
            )
        since[ended] = 0
    assert all(batch.obs[key] is array for key, array in at_start.items())
    return frames


def check_every_kind_keeps_the_contract(kind: str, info_keys: list[str] | None) -> None:
    leaves = INFO_LEAVES if info_keys else []
    with batch_of(CountingMaker(kind, N, "dict", "dict"), info_keys=info_keys) as batch:
        batch.reset()
        for number, frames in enumerate(drive(batch, 40)):
            count = check_frames(
                frames, number=number, observation="dict", action="dict", info_keys=leaves
            )
            assert count == 40 or kind in FILLER_KINDS
            assert count >= 25
    if kind not in UNCUTTABLE_KINDS:
        with batch_of(CountingMaker(kind, N), info_keys=info_keys) as batch:
            batch.reset()
            for number, frames in enumerate(drive(batch, 20, cut_after=3)):
                check_frames(frames, number=number, cut_after=3, info_keys=leaves)


def check_rows_that_cannot_be_cut_say_so(kind: str) -> None:
    with batch_of(CountingMaker(kind, N)) as batch:
        assert not batch.supports_partial_reset
        batch.reset()
        with pytest.raises(ArgumentError, match="can't be cut"):
            batch.step(sample(batch), np.ones(N, bool))


def check_every_observation_space(kind: str, observation: str) -> None:
    with batch_of(CountingMaker(kind, N, observation)) as batch:
        batch.reset()
        for number, frames in enumerate(drive(batch, 15)):
            check_frames(frames, number=number, observation=observation)


def check_every_action_space(kind: str, action: str) -> None:
    with batch_of(CountingMaker(kind, N, action=action)) as batch:
        batch.reset()
        for number, frames in enumerate(drive(batch, 15)):
            check_frames(frames, number=number, action=action)


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


def check_vector_env_that_raises(kind: str) -> None:
    with batch_of(CountingMaker(kind, 2), 2) as batch:
        batch.reset()
        wrong: Arrays = {("action",): np.array([0, 77])}
        with pytest.raises(EnvError, match=r"vector env .*step\(\) raised AssertionError: .*77"):
            batch.step(wrong)
