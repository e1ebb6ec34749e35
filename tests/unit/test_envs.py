"""Every kind of env keeps the same contract."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.wrappers import RecordEpisodeStatistics
from gymnasium.wrappers import vector as vector_wrappers
from helpers.counting_envs import (
    ACTIONS,
    IN_PROCESS_KINDS,
    CountingEnv,
    CountingMaker,
)
from helpers.env_contract import (
    N,
    batch_of,
    check_episode_statistics_of_the_vector_wrapper,
    check_wrappers_that_change_live_arrays_in_place,
    contexts,
    sample,
    statistics_of,
)

from distcollect.envs.make import EnvContext
from distcollect.rollout.spaces import flatten

IN_PROCESS_VECTOR_KINDS = [kind for kind in IN_PROCESS_KINDS if not kind.startswith("plain")]


@pytest.mark.parametrize("action", ACTIONS)
def test_plain_envs_get_actions_of_the_types_that_are_sampled(action: str) -> None:
    env = CountingEnv(action=action)
    with batch_of(env, 1) as batch:
        batch.reset()
        batch.step(sample(batch))
    [(taken, _)] = env.kept_actions
    sampled = env.action_space.sample()
    pairs = zip(flatten(env.action_space, taken), flatten(env.action_space, sampled), strict=True)
    assert type(taken) is type(sampled)
    assert all(type(mine) is type(its) and mine.dtype == its.dtype for mine, its in pairs)


@pytest.mark.parametrize("kind", ["sync-next", "native-next"])
def test_seeds_reach_vector_envs(kind: str) -> None:
    env: Any = CountingMaker(kind, 2)()
    with batch_of(env, 2) as batch:
        batch.reset([5, 8])
    assert [each.seeds for each in env.envs] == [[5], [8 if kind == "sync-next" else 6]]


def test_episode_statistics_of_plain_envs() -> None:
    statistics_of([RecordEpisodeStatistics(CountingEnv(i)) for i in range(N)], 20)


@pytest.mark.parametrize("kind", IN_PROCESS_VECTOR_KINDS)
def test_episode_statistics_of_the_vector_wrapper(kind: str) -> None:
    check_episode_statistics_of_the_vector_wrapper(kind)


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_episode_statistics_inside_a_vector_env(mode: str) -> None:
    makers = [lambda i=i: RecordEpisodeStatistics(CountingEnv(i)) for i in range(N)]
    statistics_of(gym.vector.SyncVectorEnv(makers, autoreset_mode=mode), 20)


def test_wrappers_that_refuse_partial_resets_get_fillers() -> None:
    with batch_of(
        lambda: vector_wrappers.NormalizeObservation(CountingMaker("sync-next", N)())
    ) as batch:
        assert not batch.supports_partial_reset


def test_wrappers_that_change_live_arrays_in_place() -> None:
    # With a reset mask such a wrapper still processes all rows, most of them a second time.
    check_wrappers_that_change_live_arrays_in_place("sync-next-live")


def test_declared_info_spaces_are_taken() -> None:
    declared = {
        "pair": spaces.Box(-np.inf, np.inf, (2,), np.float32),
        "nowhere": spaces.Dict({"x": spaces.Discrete(3), "y": spaces.Box(0, 1, (2,))}),
        "lap": None,
    }
    for kind in ("plain", "sync-next", "native-same"):
        with batch_of(CountingMaker(kind, N), info_keys=declared) as batch:
            batch.reset()
            batch.step(sample(batch))
            assert batch.obs["pair",].dtype == np.float32
            assert batch.obs["pair",][:, 0] == pytest.approx([1 / 3, 4 / 3, 7 / 3])
            assert not batch.obs["nowhere", "x"].any()
            assert np.isnan(batch.obs["nowhere", "y"]).all()


@pytest.mark.parametrize(
    ("create_env", "n", "rows"),
    [
        (CountingMaker(), 2, 2),
        (CountingEnv, 2, 2),
        ("CartPole-v1", 2, 2),
        (["CartPole-v1", lambda: gym.make("CartPole-v1")], 2, 2),
        (CountingMaker("sync-next", 4), 4, 4),
        (CountingMaker("sync-next", 4), 1, 4),
    ],
)
def test_what_may_be_given(create_env: Any, n: int, rows: int) -> None:
    with batch_of(create_env, n) as batch:
        assert batch.num_envs == rows
        batch.reset()
        batch.step(sample(batch))


def test_instances_are_not_called() -> None:
    class CallableEnv(CountingEnv):
        def __call__(self) -> Any:
            raise AssertionError("called")

    for given in (CallableEnv(), [CallableEnv()]):
        with batch_of(given, 1) as batch:
            assert batch.num_envs == 1


def test_an_attribute_of_the_users_env_is_not_taken_for_its_outcomes() -> None:
    env = CountingEnv()
    env.outcome_space = spaces.Dict({"won": spaces.Discrete(2)})  # type: ignore[attr-defined]
    with batch_of(env, 1) as batch:
        batch.reset()
        batch.step(sample(batch))
        assert not batch.outcomes


def test_context_is_given_to_makers_that_ask() -> None:
    seen = []

    def make(*, context: EnvContext) -> Any:
        seen.append(context)
        return CountingEnv(context.env_index)

    with batch_of(make, 2):
        assert seen == contexts(2)
