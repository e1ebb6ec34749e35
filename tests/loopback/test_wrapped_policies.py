"""Policies that are compiled, or called through a CUDA graph, get weights as any other."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from helpers.publishing import NAMES, Collect, Telling, collect, told
from tensordict.nn import CudaGraphModule
from torch import nn

__all__ = ["collect"]

# Without a GPU it calls the policy all the same. Not by `catch_warnings`: the workers are threads.
pytestmark = [
    pytest.mark.filterwarnings("ignore:This module is instantiated on a machine without"),
    pytest.mark.filterwarnings("ignore:Tensordict is registered in PyTree"),
]


def in_graph(value: float = 0.0) -> CudaGraphModule:
    return CudaGraphModule(Telling(value))


def compiled(value: float = 0.0) -> Any:
    return torch.compile(Telling(value), backend="eager")


WAYS = pytest.mark.parametrize("make", [in_graph, compiled])


class TestWrappedPolicies:
    @WAYS
    def test_they_get_weights_of_a_plain_policy(
        self, collect: Collect, make: Callable[..., Any]
    ) -> None:
        collector = collect(None, policy_factory=make)
        handle = collector.update_policy_weights_(Telling(3))
        assert handle is not None
        assert handle.acknowledged == {0: 1, 1: 1}
        assert told(collector.next()) == dict.fromkeys(NAMES, 3.0)

    @WAYS
    def test_they_begin_with_the_trainer_s_weights(
        self, collect: Collect, make: Callable[..., Any]
    ) -> None:
        policy = Telling(5)
        collector = collect(policy, policy_factory=partial(make, 1.0))
        assert told(collector.next()) == dict.fromkeys(NAMES, 5.0)
        collector.update_policy_weights_(policy.fill(6))
        assert told(collector.next()) == dict.fromkeys(NAMES, 6.0)

    def test_the_trainer_s_own_may_be_compiled(self, collect: Collect) -> None:
        policy = compiled()
        collector = collect(policy, policy_factory=Telling)
        with torch.no_grad():
            for weights in policy.state_dict().values():
                weights.fill_(4)
        for weights in (None, policy, policy.state_dict(), nn.ModuleDict({"m": policy})["m"]):
            collector.update_policy_weights_(weights)
            assert told(collector.next()) == dict.fromkeys(NAMES, 4.0)
