"""Policies that write what they compute with into each frame, and an env that pays the action.

:class:`Shown` writes a digest of its parameters and buffers, as they are when it is called, before
it changes any itself. So each frame tells which weights chose its action.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictParams
from torch import nn
from torch.nn.utils import parametrizations, parametrize

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers can't import test modules

STEPS = 3  # of an episode


class PayingEnv(gym.Env):
    """Pays the action, for three steps."""

    observation_space = gym.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return np.ones(4, np.float32), {}

    def step(self, action: np.ndarray) -> Any:
        self.steps += 1
        return np.ones(4, np.float32), float(action[0]), self.steps == STEPS, False, {}


def digest(state: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """One number for each entry of a state dict, ``[K]`` float64; tells also exchanged values."""
    return torch.stack(
        [
            (value.detach().double().reshape(-1) * torch.arange(1, value.numel() + 1)).sum()
            for value in state.values()
        ]
    )


class Shown(nn.Module):
    """Acts by its parameter ``gain``, and writes a digest of its state into each frame."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(1))

    def act(self, observation: torch.Tensor) -> Any:
        """What calling it does."""
        n = len(observation)
        shown = digest(self.state_dict()).expand(n, -1).clone()
        self.compute(observation)
        return self.gain.detach().expand(n, 1).clone(), {"digest": shown}

    forward = act

    def compute(self, observation: torch.Tensor) -> Any:
        """Compute something, and perhaps change buffers."""


class Assigning(Shown):
    """Counts its calls in buffers that it assigns anew; one of them is that of a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(3))
        self.inner = nn.Linear(4, 2)
        self.inner.register_buffer("mean", torch.zeros((), dtype=torch.float64))

    def compute(self, observation: torch.Tensor) -> None:
        self.calls = self.calls + 1
        self.inner.mean = 0.9 * self.inner.mean + 0.1 * observation.double().mean()


class Tied(Shown):
    """Has one weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(4, 4), nn.Linear(4, 4)
        self.out.weight = self.into.weight

    def compute(self, observation: torch.Tensor) -> torch.Tensor:
        return self.out(self.into(observation))


class Doubled(nn.Module):
    """A parametrization."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


class Parametrized(Shown):
    """Has a weight that is computed from another, and one whose norm is estimated in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.normed = nn.Linear(4, 4), nn.Linear(4, 4)
        parametrize.register_parametrization(self.layer, "weight", Doubled())
        parametrizations.spectral_norm(self.normed)

    def compute(self, observation: torch.Tensor) -> torch.Tensor:
        return self.normed(self.layer(observation))


class Normalising(Shown):
    """Updates the statistics of a BatchNorm with each call."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def compute(self, observation: torch.Tensor) -> torch.Tensor:
        return self.norm(torch.cat([observation, -observation]))


class Lazy(Shown):
    """Has a lazy layer, which was called once."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LazyLinear(2)
        self.layer(torch.zeros(1, 4))

    def compute(self, observation: torch.Tensor) -> torch.Tensor:
        return self.layer(observation)


class Clipping(Shown):
    """Clips a parameter in place with each call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def compute(self, observation: torch.Tensor) -> None:
        self.layer.weight.data.clamp_(-0.05, 0.05)


class OfTensorDict(Shown):
    """Has its parameters in a TensorDict."""

    def __init__(self) -> None:
        super().__init__()
        weights = {"layer": {"weight": torch.rand(3, 4), "bias": torch.rand(3)}}
        self.params = TensorDictParams(TensorDict(weights, []))


class All(Shown):
    """All of the above, in one, without those that can't be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([kind() for kind in KINDS if kind is not Parametrized])

    def compute(self, observation: torch.Tensor) -> None:
        for part in self.parts:
            part.compute(observation)


KINDS = [Assigning, Tied, Parametrized, Normalising, Lazy, Clipping, OfTensorDict]


def fill(module: nn.Module, seed: int, names: tuple[str, ...] = ("",)) -> nn.Module:
    """Give the weights whose names begin with one of ``names`` new values, in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in module.state_dict().items():
            if name.startswith(names):
                value.copy_(torch.randint(-50, 50, value.shape, generator=generator) / 8)
    return module


# Ways to give a policy.


class Agent:
    """Calls a module that it has somewhere."""

    def __init__(self, module: nn.Module) -> None:
        self.parts = {"nets": [module]}

    def __call__(self, observation: torch.Tensor) -> Any:
        return self.parts["nets"][0](observation)


class Slotted:
    """Has a method that is the policy, and no ``__dict__``."""

    __slots__ = ("net",)

    def __init__(self, module: nn.Module) -> None:
        self.net = module

    def choose(self, observation: torch.Tensor) -> Any:
        return self.net(observation)


def called(module: nn.Module, observation: torch.Tensor) -> Any:
    """Call the module."""
    return module(observation)


def called_with(observation: torch.Tensor, module: nn.Module) -> Any:
    """Call the module."""
    return module(observation)


def closure(module: nn.Module) -> Callable[..., Any]:
    """A function that refers to the module by a function that it refers to."""

    def inner(observation: torch.Tensor) -> Any:
        return module(observation)

    def outer(observation: torch.Tensor) -> Any:
        return inner(observation)

    return outer


def of_tensordicts(module: nn.Module) -> Callable[..., Any]:
    """A function that gets a TensorDict."""

    def policy(td: TensorDictBase) -> TensorDictBase:
        action, extras = module(td["observation"])
        return td.update({"action": action, **extras})

    return policy


class Outputs:
    """The action and the digest, as a TensorDictModule returns them; no module."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, observation: torch.Tensor) -> Any:
        action, extras = self.module(observation)
        return action, extras["digest"]


def tensordict_module(module: nn.Module) -> TensorDictModule:
    """A TensorDictModule that calls something that is no module."""
    return TensorDictModule(Outputs(module), in_keys=["observation"], out_keys=["action", "digest"])
