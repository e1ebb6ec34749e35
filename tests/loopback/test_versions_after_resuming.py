"""A state that is loaded after a publication numbers what workers have, and what comes later."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping

import cloudpickle
import pytest
import torch
from helpers.publishing import Collect, Telling, collect, told

import distcollect as dc

__all__ = ["collect"]

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers can't import test modules

LOADED = 100


def state_of(collector: dc.RPCDataCollector) -> dict[str, object]:
    return {**collector.state_dict(), "policy_version": LOADED}


class HeldUp(dc.RPCUpdater):
    """Sends nothing before it may."""

    def __init__(self) -> None:
        self.begun, self.may_go_on = threading.Event(), threading.Event()

    def sources(
        self, payload: torch.Tensor, peers: Mapping[int, int]
    ) -> Mapping[int, dc.WeightSource]:
        self.begun.set()
        assert self.may_go_on.wait(20)
        return super().sources(payload, peers)


def check(collector: dc.RPCDataCollector, policy: Telling) -> None:
    for _ in range(4):
        batch = collector.next(timeout_s=20)
        assert (batch["collector", "policy_version"] == LOADED).all()
        assert told(batch)["wide"] == 1
    collector.update_policy_weights_(policy.fill(2))
    while told(batch := collector.next(timeout_s=20))["wide"] != 2:
        pass
    assert (batch["collector", "policy_version"][0, -1] == LOADED + 1).all()


@pytest.mark.parametrize("sync", [True, False])
def test_what_was_acknowledged(collect: Collect, sync: bool) -> None:
    policy = Telling()
    collector = collect(policy, sync=sync, staleness=None if sync else dc.Staleness(0, mode="drop"))
    collector.update_policy_weights_(policy.fill(1))
    collector.load_state_dict(state_of(collector))
    check(collector, policy)


def test_what_was_on_its_way(collect: Collect) -> None:
    policy = Telling()
    updater = HeldUp()
    collector = collect(policy, weight_updater=updater)
    collector.update_policy_weights_(policy.fill(1), wait=False)
    assert updater.begun.wait(20)
    collector.load_state_dict(state_of(collector))
    threading.Timer(0.2, updater.may_go_on.set).start()
    check(collector, policy)
