"""Env ids that stand for all envs of a worker at once."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from gymnasium.vector import VectorEnv
from helpers.loopback_pool import loopback_collector

import distcollect as dc
from distcollect.envs.vector_ids import vector_maker

N, T = 4, 30


def turning(observation: torch.Tensor) -> torch.Tensor:
    return (observation.double().flatten(1).sum(-1) * 1000).long() % 2


def batches_of(seed: int | None, **kwargs: Any) -> torch.Tensor:
    pytest.importorskip("envpool", reason="EnvPool is not installed")
    collector = dc.SyncDataCollector(
        "envpool:CartPole-v1", turning, frames_per_batch=N * T, envs_per_worker=N, **kwargs
    )
    with collector:
        if seed is not None:
            collector.set_seed(seed)
        return torch.cat([collector.next()["observation"] for _ in range(3)], 1)


def test_seeds_reach_each_env_of_envpool() -> None:
    one, same, other = batches_of(5), batches_of(5), batches_of(6)
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert len({tuple(row.flatten().tolist()) for row in one}) == N
    assert not torch.equal(batches_of(None), batches_of(None))


def test_envs_of_envpool_do_not_depend_on_the_number_of_workers() -> None:
    one = batches_of(5)
    collector = loopback_collector(
        "envpool:CartPole-v1",
        turning,
        num_workers=2,
        sync=True,
        frames_per_batch=N * T,
        envs_per_worker=N // 2,
    )
    with collector:
        collector.set_seed(5)
        two = torch.cat([collector.next(timeout_s=60)["observation"] for _ in range(3)], 1)
    assert torch.equal(one, two)


def test_envpool_gets_as_many_envs_and_threads_as_there_are() -> None:
    pytest.importorskip("envpool", reason="EnvPool is not installed")
    pool: Any = vector_maker("envpool:CartPole-v1", 3)
    config = pool().config
    threads = min(3, len(os.sched_getaffinity(0)))
    assert (config["num_envs"], config["num_threads"]) == (3, threads)


@pytest.mark.parametrize("env_id", ["ale:Pong", "ale:pong"])
def test_ale(env_id: str) -> None:
    with dc.SyncDataCollector(env_id, frames_per_batch=2 * 3, envs_per_worker=2) as collector:
        batch = collector.next()
    assert batch["observation"].shape == (2, 3, 4, 84, 84)
    assert batch["observation"].dtype == torch.uint8


def test_unknown_envs_are_refused() -> None:
    with pytest.raises(dc.ArgumentError, match=r"no env 'ale:Pongg': ALE has no game 'pongg'"):
        dc.SyncDataCollector("ale:Pongg", frames_per_batch=8)
    pytest.importorskip("envpool", reason="EnvPool is not installed")
    with pytest.raises(dc.ArgumentError, match=r"no env 'envpool:Pongg': EnvPool has no 'Pongg'"):
        dc.SyncDataCollector("envpool:Pongg", frames_per_batch=8)


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "envpool", None)
    with pytest.raises(dc.ArgumentError, match=r"pip install 'distcollect\[envpool\]'"):
        dc.SyncDataCollector("envpool:Pong-v5", frames_per_batch=8)


@pytest.mark.parametrize("by_id", [True, False], ids=["by id", "by maker"])
def test_an_envpool_without_a_private_part_is_refused(
    by_id: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    envpool = pytest.importorskip("envpool", reason="EnvPool is not installed")
    env = "envpool:CartPole-v1" if by_id else lambda: envpool.make_gymnasium("CartPole-v1")
    monkeypatch.delattr("envpool.classic_control.CartPoleGymnasiumEnvPool._to")
    complaint = r"CartPoleGymnasiumEnvPool: EnvPool [\d.]+ lacks _to, .* use envpool 1\.2\.5"
    make: Any = dc.MultiSyncDataCollector if by_id else dc.SyncDataCollector
    with pytest.raises(dc.ArgumentError, match=complaint):
        make(env, frames_per_batch=8)


def test_other_ids_are_those_of_gymnasium() -> None:
    for env_id in ("CartPole-v1", "ale_py:ALE/Pong-v5", VectorEnv, None):
        assert vector_maker(env_id) is None
