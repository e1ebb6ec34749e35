"""On which device the workers' policies compute."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from distcollect.collectors.pickling import home, pickled_plans
from distcollect.engine.plan import WorkerPlan
from distcollect.errors import ArgumentError


class Placed(nn.Module):
    """Its only parameter says that it is on a device, which this host may lack."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = torch.device(device)

    def parameters(self, recurse: bool = True) -> Any:
        yield SimpleNamespace(device=self._device)


def test_a_policy_on_the_cpu_stays_there() -> None:
    policy = nn.Linear(4, 2)
    assert home(policy, {"other": nn.Linear(4, 2)}) is None
    assert home(None, {}) is None
    assert home(lambda observation: observation, {}) is None
    [payload] = pickled_plans(WorkerPlan("CartPole-v1", 1, policy=policy), ["CartPole-v1"])
    assert pickle.loads(payload).device is None


def test_a_policy_on_a_gpu_computes_on_one() -> None:
    policy, model = Placed("cuda:1"), Placed("cuda:1")
    # Whichever: a worker's host may number its GPUs in another way.
    assert home(policy, {"other": model}) == torch.device("cuda")


def test_which_device_is_not_known() -> None:
    policy, model = Placed("cuda:1"), Placed("cuda:0")
    for models, found in (
        ({"m": model}, "cuda:0, cuda:1"),
        ({"m": nn.Linear(4, 2)}, "cpu, cuda:1"),
    ):
        with pytest.raises(ArgumentError, match=f"are on {found}; .*policy_device='cpu' or 'cuda'"):
            home(policy, models)
    with pytest.raises(ArgumentError, match="are on meta"):
        home(nn.Linear(4, 2, device="meta"), {})


def test_the_device_that_was_named_counts() -> None:
    plan = WorkerPlan("CartPole-v1", 1, policy=nn.Linear(4, 2), device=torch.device("cuda:3"))
    [payload] = pickled_plans(plan, ["CartPole-v1"])
    assert pickle.loads(payload).device == torch.device("cuda:3")
