"""Weights may be swapped in between rollouts only."""

from __future__ import annotations

import sys
import threading

import cloudpickle
from helpers.publishing import Collect, Telling, collect

import distcollect as dc

__all__ = ["collect"]

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers can't import test modules


def test_swaps_between_rollouts_only(collect: Collect) -> None:
    policy = Telling()
    collector = collect(
        policy,
        sync=False,
        num_workers=2,
        weight_sync=dc.WeightSync(swap_within_rollouts=False),
    )
    collector.next()
    done = threading.Event()

    def publish() -> None:
        version = 0
        while not done.is_set():
            version += 1
            collector.update_policy_weights_(Telling(version))

    publisher = threading.Thread(target=publish)
    publisher.start()
    try:
        for _ in range(300):
            versions = collector.next()["collector", "policy_version"]
            assert (versions == versions[0, 0]).all()
    finally:
        done.set()
        publisher.join(20)
    assert collector.policy_version > 3
