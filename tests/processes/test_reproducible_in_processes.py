"""Asynchronous collection in worker processes gives the same batches each time."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.reproducing import Learned, Uneven, check_same_batches

import distcollect as dc


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("make", [dc.RPCDataCollector])
def test_same_batches(make: Any, wait: bool) -> None:
    check_same_batches(make, wait)


def test_a_call_doesn_t_swap_weights_within_a_rollout() -> None:
    sync = dc.WeightSync(swap_within_rollouts=False)
    with dc.RPCDataCollector(
        lambda: Uneven(0.02), Learned(), frames_per_batch=100, num_workers=1, weight_sync=sync
    ) as collector:
        for version in range(1, 4):
            handle = collector.update_policy_weights_(Learned(version), wait=False)
            handle.wait()
            collector.call("spec")
        versions = [collector.next()["collector", "policy_version"] for _ in range(3)]
    assert all((each == each[0, 0]).all() for each in versions)
    assert versions[-1][0, 0] == 3
