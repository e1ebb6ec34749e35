"""The data contract, kept by worker processes and by envs in processes of their own."""

from __future__ import annotations

import multiprocessing
import time
from typing import Any

import gymnasium as gym
import pytest
import torch
from helpers.batch_contract import (
    DELIVERIES,
    HEAVY,
    LIGHT,
    SPACES,
    T,
    Teller,
    check_a_maker_for_each_worker,
    check_contract,
    check_info_keys,
    check_trajectories_do_not_depend_on_the_number_of_workers,
    same,
)
from helpers.counting_envs import ASYNC_KINDS
from helpers.env_contract import (
    check_episode_statistics_of_the_vector_wrapper,
    check_wrappers_that_change_live_arrays_in_place,
)
from helpers.policies import CategoricalPolicy
from helpers.versions import version_of
from tensordict import TensorDict

import distcollect as dc


@pytest.mark.parametrize("kind", ASYNC_KINDS)
@pytest.mark.parametrize("spaces", SPACES[:2], ids="-".join)
@pytest.mark.parametrize("delivery", LIGHT)
def test_every_env_kind(delivery: str, kind: str, spaces: tuple[str, str]) -> None:
    check_contract(delivery, kind, spaces)


@pytest.mark.parametrize("spaces", SPACES[2:], ids="-".join)
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
    ("kind", "spaces"),
    [
        ("plain", ("dict", "dict")),
        ("sync-next", ("box64", "box")),
        ("async-same-live", ("image", "tuple")),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
@pytest.mark.parametrize("delivery", HEAVY)
def test_worker_processes(delivery: str, kind: str, spaces: tuple[str, str]) -> None:
    check_contract(delivery, kind, spaces)


def test_a_maker_for_each_worker() -> None:
    check_a_maker_for_each_worker("rpc-async")


def test_same_seed_same_batches() -> None:
    """Equal bit for bit: the envs, random actions at the start, the policy's noise, and all ids."""
    torch.manual_seed(0)
    policy = CategoricalPolicy()

    def collect(*seeds: int) -> list[TensorDict]:
        options = {"init_random_frames": 50}
        with DELIVERIES["rpc-sync"].start("CartPole-v1", policy, **options) as collector:
            batches = []
            for seed in seeds:
                assert collector.set_seed(seed) != seed
                batches += [collector.next(timeout_s=60) for _ in range(4)]
        return batches

    first, again = collect(3, 4), collect(3, 4)
    for one, other in zip(first, again, strict=True):
        assert same(one, other)
    assert not torch.equal(first[3]["observation"], first[7]["observation"])


def test_trajectories_do_not_depend_on_the_number_of_workers() -> None:
    check_trajectories_do_not_depend_on_the_number_of_workers("rpc-sync", False)


class SlowAtFirst(gym.Wrapper[Any, Any, Any, Any]):
    """The first three steps take 0.2 s each."""

    left = 3

    def step(self, action: Any) -> Any:
        if self.left:
            self.left -= 1
            time.sleep(0.2)
        return super().step(action)


def test_a_sync_batch_that_came_too_late_is_not_the_next_one() -> None:
    """Rollouts requested before the timeout do not come in the next batch."""
    policy = Teller()
    with dc.RPCDataCollector(
        lambda: SlowAtFirst(gym.make("CartPole-v1")),
        policy,
        frames_per_batch=2 * T,
        num_workers=2,
        sync=True,
    ) as collector:
        with pytest.raises(dc.BatchTimeout, match=r"waited for workers \[0, 1\]"):
            collector.next(timeout_s=0.05)
        with torch.no_grad():
            policy.told.fill_(1)
        collector.update_policy_weights_()
        batch = collector.next(timeout_s=60)
        assert batch.shape == (2, T)
        assert (batch["collector", "policy_version"] == 1).all()
        assert (batch["told"] == 1).all()
