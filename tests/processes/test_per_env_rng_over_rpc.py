"""Noise per env in worker processes."""

from __future__ import annotations

import pytest
from helpers.per_env_rng import collected, same

import distcollect as dc


@pytest.mark.parametrize(
    ("policy", "num_workers"), [("distribution", 1), ("tensordict", 2), ("callable", 4)]
)
def test_over_rpc(policy: str, num_workers: int) -> None:
    expected = collected(dc.SyncDataCollector, policy, 0, seed=1)
    batch = collected(dc.RPCDataCollector, policy, num_workers, seed=1)
    assert same(batch, expected)
    assert same(collected(dc.RPCDataCollector, policy, num_workers, seed=1), batch)
