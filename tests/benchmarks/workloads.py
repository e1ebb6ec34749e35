"""The workloads: an env and a policy, the same for every contender.

For each frame every contender calls the workload's policy module (which draws an
action and computes its log-probability) without autograd, steps a plain Gymnasium env, and stores
observation, action, log-probability, reward, terminated and truncated, and at the end of an episode
the true final observation.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.distributions import Categorical, Normal

Env: TypeAlias = "gym.Env[Any, Any]"
Chosen: TypeAlias = "tuple[Tensor, dict[str, Tensor]]"

_HIDDEN = 64
_EPISODE = 100  # frames in an episode of the envs below
_PIXELS = 64  # of the big observation, which its policy uses


@dataclass(frozen=True)
class Workload:
    """An env and a policy.

    Attributes:
        make_env: makes one env.
        make_policy: makes the policy, from observation ``[n, *obs]`` to (action, extras).
        num_envs: n, number of envs of each worker.
        num_steps: T, number of steps of each env in a rollout.
    """

    make_env: Callable[[], Env]
    make_policy: Callable[[], nn.Module]
    num_envs: int
    num_steps: int

    @property
    def rollout_frames(self) -> int:
        """Frames in a rollout: n * T."""
        return self.num_envs * self.num_steps


class CategoricalPolicy(nn.Module):
    """Draws an action from the logits that ``body`` computes."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, observation: Tensor) -> Chosen:
        """``[n, *obs]`` to (int64 ``[n]``, ``{"action_log_prob": [n]}``)."""
        chosen = Categorical(logits=self.body(observation), validate_args=False)
        action = chosen.sample()  # type: ignore[no-untyped-call]
        return action, {"action_log_prob": chosen.log_prob(action)}  # type: ignore[no-untyped-call]


class GaussianPolicy(nn.Module):
    """Draws a vector of ``actions`` numbers; observations may be float64."""

    def __init__(self, observations: int, actions: int) -> None:
        super().__init__()
        self.body = mlp(observations, actions)
        self.log_std = nn.Parameter(torch.full((actions,), -1.0))

    def forward(self, observation: Tensor) -> Chosen:
        """``[n, obs]`` to (float32 ``[n, actions]``, ``{"action_log_prob": [n]}``)."""
        mean = self.body(observation.float())
        chosen = Normal(mean, self.log_std.exp(), validate_args=False)
        action = chosen.sample()  # type: ignore[no-untyped-call]
        log_prob = chosen.log_prob(action)  # type: ignore[no-untyped-call]
        return action, {"action_log_prob": log_prob.sum(-1)}


class Bytes(nn.Module):
    """Turns uint8 into float32 between 0 and 1."""

    def forward(self, pixels: Tensor) -> Tensor:
        """A tensor of any shape."""
        return pixels.float().mul_(1 / 255)


class Corner(nn.Module):
    """Keeps the first pixels of an image: the policy then costs little beside moving the image."""

    def forward(self, image: Tensor) -> Tensor:
        """uint8 ``[..., H, W]`` to float32 ``[..., 64]``."""
        return image[..., 0, :_PIXELS].float().mul_(1 / 255)


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    """Two hidden layers of 64, tanh."""
    return nn.Sequential(
        nn.Linear(inputs, _HIDDEN),
        nn.Tanh(),
        nn.Linear(_HIDDEN, _HIDDEN),
        nn.Tanh(),
        nn.Linear(_HIDDEN, outputs),
    )


class SleepingEnv(gym.Env[Any, Any]):
    """Sleeps for 5 ms in each step. Its observation is the id of its process, four times."""

    observation_space = spaces.Box(0, np.inf, (4,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self._frames = 0
        self._observation = np.full(4, os.getpid(), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._frames = 0
        return self._observation, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(0.005)
        self._frames += 1
        return self._observation, 1.0, self._frames == _EPISODE, False, {}


class SleepingImages(SleepingEnv):
    """The same, with an image of random bytes."""

    observation_space = spaces.Box(0, 255, (4, 84, 84), np.uint8)

    def __init__(self) -> None:
        super().__init__()
        self._observation = np.random.default_rng(0).integers(0, 256, (4, 84, 84), np.uint8)


class BigEnv(gym.Env[Any, Any]):
    """Writes a new image (uint8 ``[side, side]``) for each step; 100 frames an episode."""

    def __init__(self, side: int) -> None:
        self._shape = (side, side)
        self.observation_space = spaces.Box(0, 255, self._shape, np.uint8)
        self.action_space = spaces.Discrete(2)
        self._frames = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._frames = 0
        return np.full(self._shape, 0, np.uint8), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._frames += 1
        image = np.full(self._shape, self._frames, np.uint8)
        return image, 1.0, self._frames == _EPISODE, False, {}


def make_cartpole() -> Env:
    """CartPole-v1 of ``gymnasium.make``."""
    return gym.make("CartPole-v1")


def make_breakout() -> Env:
    """``ALE/Breakout-v5``, the usual preprocessing: uint8 ``[4, 84, 84]``, 4 frames skipped."""
    gym.register_envs(importlib.import_module("ale_py"))
    env = gym.make("ALE/Breakout-v5", frameskip=1)
    return gym.wrappers.FrameStackObservation(gym.wrappers.AtariPreprocessing(env), 4)


def small_policy() -> nn.Module:
    """A policy for observations of 4 numbers and 2 actions."""
    return CategoricalPolicy(mlp(4, 2))


def cnn_policy(num_actions: int = 4) -> nn.Module:
    """A small CNN for uint8 images 84x84x4."""
    body = nn.Sequential(
        Bytes(),
        nn.Conv2d(4, 16, 8, stride=4),
        nn.ReLU(),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2592, 256),
        nn.ReLU(),
        nn.Linear(256, num_actions),
    )
    return CategoricalPolicy(body)


def corner_policy() -> nn.Module:
    """A policy that uses 64 pixels of a big image."""
    return CategoricalPolicy(nn.Sequential(Corner(), mlp(_PIXELS, 2)))


_CARTPOLE = (make_cartpole, small_policy)
SLEEPING = Workload(SleepingEnv, small_policy, 1, 32)
SLEEPING_IMAGES = Workload(SleepingImages, partial(cnn_policy, 2), 4, 32)

WORKLOADS: dict[str, Workload] = {
    "cartpole-1": Workload(*_CARTPOLE, 1, 1024),
    "cartpole-16": Workload(*_CARTPOLE, 16, 256),
    "cartpole-64": Workload(*_CARTPOLE, 64, 64),
    "atari": Workload(make_breakout, cnn_policy, 4, 64),
    "pixels": Workload(partial(BigEnv, 256), corner_policy, 1, 64),
}
