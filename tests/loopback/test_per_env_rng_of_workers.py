"""Noise per env: trajectories do not depend on the number of workers."""

from __future__ import annotations

import pytest
from helpers.loopback_pool import loopback_collector
from helpers.per_env_rng import POLICIES, collected, same

import distcollect as dc


@pytest.mark.parametrize("policy", POLICIES)
def test_trajectories_do_not_depend_on_the_number_of_workers(policy: str) -> None:
    expected = collected(dc.SyncDataCollector, policy, 0, seed=1)
    assert expected["next", "done"].sum() > 4
    starts = {tuple(row.flatten().tolist()) for row in expected["action"]}
    assert len(starts) == 4
    for num_workers in (1, 2, 4):
        assert same(collected(loopback_collector, policy, num_workers, seed=1), expected)
    assert not same(collected(dc.SyncDataCollector, policy, 0, seed=2), expected)
