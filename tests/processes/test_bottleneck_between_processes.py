"""What bounds a collector with worker processes."""

from __future__ import annotations

from helpers.bottlenecks import Env, Policy, collect

import distcollect as dc


def test_bound_by_moving_and_by_weights_between_processes() -> None:
    big = dc.MultiaSyncDataCollector(
        lambda: Env(shape=(512, 512, 4)), Policy(), frames_per_batch=32, num_workers=1
    )
    assert collect(big, num_batches=30) == "network"
    policy = Policy(weights=8_000_000)
    pushing = dc.aSyncDataCollector(Env, policy, frames_per_batch=20)
    assert collect(pushing, num_batches=15, push=policy) == "weights"
