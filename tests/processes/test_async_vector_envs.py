"""AsyncVectorEnvs keep the contract of envs."""

from __future__ import annotations

import multiprocessing

import pytest
from helpers.counting_envs import (
    ACTIONS,
    ASYNC_KINDS,
    OBSERVATIONS,
    UNCUTTABLE_KINDS,
)
from helpers.env_contract import (
    INFO_KEYS,
    check_episode_statistics_of_the_vector_wrapper,
    check_every_action_space,
    check_every_kind_keeps_the_contract,
    check_every_observation_space,
    check_rows_that_cannot_be_cut_say_so,
    check_vector_env_that_raises,
    check_wrappers_that_change_live_arrays_in_place,
)
from helpers.versions import version_of


@pytest.mark.parametrize("kind", ASYNC_KINDS)
@pytest.mark.parametrize("info_keys", [None, INFO_KEYS], ids=["", "infos"])
def test_every_kind_keeps_the_contract(kind: str, info_keys: list[str] | None) -> None:
    check_every_kind_keeps_the_contract(kind, info_keys)


def test_processes_that_are_spawned() -> None:
    multiprocessing.set_start_method("spawn", force=True)
    check_every_kind_keeps_the_contract("async-next", None)


@pytest.mark.parametrize("kind", [kind for kind in ASYNC_KINDS if kind in UNCUTTABLE_KINDS])
def test_rows_that_cannot_be_cut_say_so(kind: str) -> None:
    check_rows_that_cannot_be_cut_say_so(kind)


@pytest.mark.parametrize("kind", ["async-next-live"])
@pytest.mark.parametrize("observation", OBSERVATIONS)
def test_every_observation_space(kind: str, observation: str) -> None:
    if observation == "dtypes" and version_of("gymnasium") < (1, 4):
        pytest.skip("Gymnasium shares no memory of dtype float16 before version 1.4")
    check_every_observation_space(kind, observation)


@pytest.mark.parametrize("kind", ["async-disabled"])
@pytest.mark.parametrize("action", ACTIONS)
def test_every_action_space(kind: str, action: str) -> None:
    check_every_action_space(kind, action)


@pytest.mark.parametrize("kind", ASYNC_KINDS)
def test_episode_statistics_of_the_vector_wrapper(kind: str) -> None:
    check_episode_statistics_of_the_vector_wrapper(kind)


@pytest.mark.parametrize("kind", ["async-next-live"])
def test_wrappers_that_change_live_arrays_in_place(kind: str) -> None:
    # A masked reset runs such a wrapper over all rows, so over most of them a second time.
    check_wrappers_that_change_live_arrays_in_place(kind)


@pytest.mark.filterwarnings("ignore::UserWarning")  # how AsyncVectorEnv logs it
@pytest.mark.parametrize("kind", ["async-next"])
def test_vector_env_that_raises(kind: str) -> None:
    check_vector_env_that_raises(kind)
