"""Policies whose code travels to workers."""

from __future__ import annotations

import sys
import types
from typing import Any

import gymnasium as gym
import pytest
import torch
from gymnasium.envs.registration import EnvSpec, WrapperSpec

import distcollect as dc

NET = """
import torch
from torch import nn

OFFSET = 1

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 2)
    def forward(self, observation):
        return (self.net(observation)[:, 0].long() + OFFSET) % 2
"""
CONSTANT = """
import gymnasium as gym

class Constant(gym.ObservationWrapper):
    def __init__(self, env, value):
        super().__init__(env)
        self.value = value
    def observation(self, observation):
        return observation * 0 + self.value

def make_late(value):
    return Constant(gym.make("CartPole-v1"), value)
"""
CACHED = """
import functools
import gymnasium as gym

class Table(gym.ObservationWrapper):
    @functools.lru_cache(maxsize=3, typed=True)
    def value(self, of):
        return of and 1 + self.value(of - 1)
    def observation(self, observation):
        assert Table.value.cache_parameters() == {"maxsize": 3, "typed": True}
        return observation * 0 + self.value(7)

@functools.cache
def make():
    return Table(gym.make("CartPole-v1"))
"""


def _in_main(source: str) -> Any:
    """What is defined in a script or notebook, which no worker can import."""
    module = types.ModuleType("__main__")
    exec(source, module.__dict__)
    return module


def test_functions_of_a_script_that_keep_their_results_travel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    main = _in_main(CACHED)
    monkeypatch.setitem(sys.modules, "__main__", main)  # where a name would be looked up
    with dc.MultiSyncDataCollector(main.make, frames_per_batch=8, num_workers=1) as collector:
        assert (collector.next()["observation"] == 7).all()


def test_code_travels() -> None:
    """A class from __main__, a closure and a lambda; for policies and env makers."""
    net, told = _in_main(NET).Net(), 7

    def make_env(context: Any) -> gym.Env[Any, Any]:
        class Shifted(gym.ObservationWrapper):
            def observation(self, observation: Any) -> Any:
                return observation * 0 + told + context.worker_id

        return Shifted(gym.make("CartPole-v1"))

    with dc.RPCDataCollector(
        make_env,
        policy_factory=lambda: lambda x: (net(x), {"told": x[:, 0]}),
        frames_per_batch=8,
        num_workers=2,
        sync=True,
    ) as collector:
        batch = collector.next()
    assert batch["observation"][:, 0, 0].tolist() == [7, 8]
    assert batch["told"][:, 0].tolist() == [7, 8]
    expected = net(batch["observation"].reshape(-1, 4)).reshape(2, -1)
    assert torch.equal(batch["action"], expected)


def test_envs_registered_in_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """By their id, and within a callable; a class and a wrapper of the main script."""
    main = _in_main(CONSTANT)
    monkeypatch.setattr(sys.modules["__main__"], "Constant", main.Constant, raising=False)
    wrapper = WrapperSpec("C", "__main__:Constant", {"value": 3.0})
    cartpole = "gymnasium.envs.classic_control:CartPoleEnv"
    late = {"kwargs": {"value": 2.0}, "max_episode_steps": 4}
    for spec in (
        EnvSpec("mine/Late-v0", main.make_late, **late),
        EnvSpec("Wrapped-v3", cartpole, additional_wrappers=(wrapper,)),
    ):
        monkeypatch.setitem(gym.registry, spec.id, spec)
    with dc.RPCDataCollector(
        ["mine/Late-v0", lambda: gym.make("Wrapped-v3")], frames_per_batch=16, sync=True
    ) as collector:
        batch = collector.next()
    assert batch["observation"][:, :, 0].unique(dim=1).tolist() == [[2.0], [3.0]]
    assert batch["next", "truncated"][0, 3]
