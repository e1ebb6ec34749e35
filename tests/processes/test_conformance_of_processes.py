"""The data contract, kept by worker processes and by envs in processes of their own."""

from __future__ import annotations

import multiprocessing
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv
from helpers.batch_contract import (
    SPACES,
    check_contract,
    check_info_keys,
)
from helpers.counting_envs import ASYNC_KINDS, CountingEnv
from helpers.env_contract import (
    check_episode_statistics_of_the_vector_wrapper,
    check_wrappers_that_change_live_arrays_in_place,
)
from helpers.versions import version_of

import distcollect as dc


@pytest.mark.parametrize("spaces", SPACES, ids="-".join)
def test_every_space_of_an_async_vector_env(spaces: tuple[str, str]) -> None:
    if spaces[0] == "dtypes" and version_of("gymnasium") < (1, 4):
        pytest.skip("Gymnasium shares no memory of dtype float16 before version 1.4")
    check_contract("in-process", "async-next-live", spaces)


def test_processes_that_are_spawned() -> None:
    multiprocessing.set_start_method("spawn", force=True)
    check_contract("in-process", "async-next", SPACES[0])


@pytest.mark.parametrize("kind", ASYNC_KINDS)
def test_info_keys(kind: str) -> None:
    check_info_keys("in-process", kind)


@pytest.mark.parametrize("kind", ASYNC_KINDS)
def test_episode_statistics_of_the_vector_wrapper(kind: str) -> None:
    check_episode_statistics_of_the_vector_wrapper(kind)


def test_wrappers_that_change_live_arrays_in_place() -> None:
    check_wrappers_that_change_live_arrays_in_place("async-next-live")


@pytest.mark.parametrize(
    ("delivery", "kind", "spaces"),
    [
        ("rpc-sync", "plain", ("dict", "dict")),
        ("rpc-multia", "async-same-live", ("image", "tuple")),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_worker_processes(delivery: str, kind: str, spaces: tuple[str, str]) -> None:
    check_contract(delivery, kind, spaces)


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
    rows = [partial(CountingEnv, row, lengths=(3 + 2 * row,)) for row in range(2)]
    with dc.SyncDataCollector(lambda: FramesOfHalves(rows), None, frames_per_batch=16) as each:
        batch = each.next()
    assert (batch["next", "reward"][..., 0] == batch["next", "observation"][..., 2]).all()
