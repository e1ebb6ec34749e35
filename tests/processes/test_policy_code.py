"""Policies whose code travels to workers."""

from __future__ import annotations

import types
from typing import Any

import gymnasium as gym
import torch
from torch import nn

import distcollect as dc


def _in_main() -> type[nn.Module]:
    """A class as a script or a notebook defines it: no worker can import it."""
    module = types.ModuleType("__main__")
    exec(
        """
import torch
from torch import nn

OFFSET = 1

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 2)
    def forward(self, observation):
        return (self.net(observation)[:, 0].long() + OFFSET) % 2
""",
        module.__dict__,
    )
    made: type[nn.Module] = module.Net
    assert made.__module__ == "__main__"
    return made


def test_code_travels() -> None:
    """A class from __main__, in a closure, in a lambda; an env maker likewise."""
    net, told = _in_main()(), 7

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
