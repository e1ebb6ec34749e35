"""On which device the workers' policies compute."""

from __future__ import annotations

import itertools
from functools import partial
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import pytest
import torch
from torch import nn

from distcollect.collectors.options import MultiSyncOptions
from distcollect.collectors.pickling import home, pickled_plans
from distcollect.engine.build import build_engine
from distcollect.engine.pickled_plan import unpickled
from distcollect.engine.plan import WorkerPlan
from distcollect.errors import ArgumentError, PolicyError


class Placed(nn.Module):
    """Its only parameter says that it is on a device, which this host may lack."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = torch.device(device)

    def parameters(self, recurse: bool = True) -> Any:
        yield SimpleNamespace(device=self._device)


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


class TestAListHasOneForEachWorker:
    def test_devices_and_factories(self) -> None:
        factories = [nn.Identity, nn.Flatten]
        options = MultiSyncOptions(
            ["CartPole-v1"] * 2,
            policy_factory=factories,
            frames_per_batch=4,
            policy_device=["cpu", "meta"],
            env_device=["meta", "cpu"],
        )
        plans = [unpickled(plan) for plan in options.pickled_plans()]
        assert [plan.device.type for plan in plans] == ["cpu", "meta"]
        assert [plan.env_device.type for plan in plans] == ["meta", "cpu"]
        assert [plan.policy_factory for plan in plans] == factories
        assert options.devices.storing is None

    def test_the_default_of_all_devices(self) -> None:
        settings: dict[str, Any] = {"frames_per_batch": 4, "device": ["cpu", "meta"]}
        options = MultiSyncOptions(["CartPole-v1"] * 2, storing_device="cpu", **settings)
        plans = [unpickled(plan) for plan in options.pickled_plans()]
        assert [plan.device.type for plan in plans] == ["cpu", "meta"]
        assert [plan.env_device.type for plan in plans] == ["cpu", "meta"]
        with pytest.raises(ArgumentError, match="give one storing_device"):
            MultiSyncOptions(["CartPole-v1"] * 2, **settings)

    def test_another_number_of_devices(self) -> None:
        with pytest.raises(ArgumentError, match="one device for each worker, and there are 3"):
            MultiSyncOptions(
                "CartPole-v1", num_workers=3, frames_per_batch=6, policy_device=["cpu"] * 2
            )


@pytest.mark.skipif(torch.cuda.is_available(), reason="this host has a GPU")
class TestADeviceThatAWorkerLacks:
    @pytest.mark.parametrize("env", ["gymnasium", "torchrl"])
    @pytest.mark.parametrize("moved", ["policy", "model"])
    def test_the_error_says_what_to_do(self, env: str, moved: str) -> None:
        if env == "torchrl":
            pytest.importorskip("torchrl", reason="the torchrl extra is not installed")
        plan = WorkerPlan(
            "CartPole-v1" if env == "gymnasium" else _torchrl_cartpole,
            1,
            policy=nn.Linear(4, 2) if moved == "policy" else None,
            models={"m": nn.Linear(4, 2)} if moved == "model" else {},
            device=torch.device("cuda"),
        )
        with pytest.raises(PolicyError, match=r"can't be moved to 'cuda' .*policy_device='cpu'"):
            build_engine(plan, traj_ids=itertools.count())


def _torchrl_cartpole() -> Any:
    from torchrl.envs import GymEnv  # noqa: PLC0415 - not where no test needs it

    return GymEnv("CartPole-v1")


def test_tensors_are_pickled_once_for_all_workers() -> None:
    """Envs may refer to the policy; weights that are tied stay tied."""
    policy = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    policy[1].weight = policy[0].weight
    makers = [partial(gym.make, "CartPole-v1", critic=policy[index]) for index in range(2)]
    (tensors, first), (same, second) = pickled_plans(
        [WorkerPlan(maker, 1, policy=policy) for maker in makers]
    )
    assert same is tensors
    plans = [unpickled((tensors, plan)) for plan in (first, second)]
    for index, plan in enumerate(plans):
        assert plan.create_env_fn.keywords["critic"] is plan.policy[index]
        assert plan.policy[1].weight is plan.policy[0].weight
        torch.testing.assert_close(plan.policy.state_dict(), policy.state_dict())
    assert plans[0].policy[0].weight is not plans[1].policy[0].weight
