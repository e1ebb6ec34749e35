"""What is collected: an env and a policy, the same for every contender.

Every contender does this work for each frame: it calls the workload's policy module (which draws an
action and computes its log-probability) without autograd, steps a plain Gymnasium env, and stores
observation, action, log-probability, reward, terminated and truncated, and at the end of an episode
the true final observation. Frames are transitions that really happened.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
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
_EPISODE = 100  # frames of an episode of the envs that are made up here
_SIDE = 1024  # of the big observation: 1 MiB
_PIXELS = 64  # of the big observation that its policy looks at


@dataclass(frozen=True)
class Workload:
    """An env and a policy.

    Attributes:
        name: as the command line has it.
        about: a line for a person.
        make_env: makes one env.
        make_policy: makes the policy: observation ``[n, *obs]`` to (action, log-probability).
        num_envs: n, envs of each worker.
        num_steps: T, steps of each env in a rollout.
        needs: modules that must be installed.
    """

    name: str
    about: str
    make_env: Callable[[], Env]
    make_policy: Callable[[], nn.Module]
    num_envs: int
    num_steps: int
    needs: tuple[str, ...] = ()

    @property
    def rollout_frames(self) -> int:
        """N * T."""
        return self.num_envs * self.num_steps


class CategoricalPolicy(nn.Module):
    """Draws one of ``actions`` from the logits of ``body``."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, observation: Tensor) -> Chosen:
        """``[n, *obs]`` to (int64 ``[n]``, ``{"action_log_prob": [n]}``)."""
        chosen = Categorical(logits=self.body(observation), validate_args=False)
        action = chosen.sample()  # type: ignore[no-untyped-call]
        return action, {"action_log_prob": chosen.log_prob(action)}  # type: ignore[no-untyped-call]


class GaussianPolicy(nn.Module):
    """Draws a vector of ``actions`` numbers; takes float64 observations too."""

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
    """uint8 to float32 between 0 and 1."""

    def forward(self, pixels: Tensor) -> Tensor:
        """Any shape."""
        return pixels.float().mul_(1 / 255)


class Corner(nn.Module):
    """The first pixels of an image: a policy that costs nothing next to moving the image."""

    def forward(self, image: Tensor) -> Tensor:
        """uint8 ``[..., H, W]`` to float32 ``[..., 64]``: TorchRL has no n for a single env."""
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


class SlowEnv(gym.Env[Any, Any]):
    """Takes a fixed time for a step, and almost no CPU besides.

    Its observation is float32 ``[4]``; an episode has 100 frames.
    """

    def __init__(self, step_s: float, *, spin: bool) -> None:
        """``spin``: keep the core busy for ``step_s`` seconds; otherwise sleep."""
        self.observation_space = spaces.Box(-1, 1, (4,), np.float32)
        self.action_space = spaces.Discrete(2)
        self._step_s = step_s
        self._spin = spin
        self._frames = 0
        self._observation = np.zeros(4, np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._frames = 0
        return self._observation, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self._spin:
            end = time.perf_counter() + self._step_s
            while time.perf_counter() < end:
                pass
        else:
            time.sleep(self._step_s)
        self._frames += 1
        return self._observation, 1.0, self._frames == _EPISODE, False, {}


class BigEnv(gym.Env[Any, Any]):
    """Writes a new 1 MiB image (uint8 ``[1024, 1024]``) for each step; 100 frames an episode."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(0, 255, (_SIDE, _SIDE), np.uint8)
        self.action_space = spaces.Discrete(2)
        self._frames = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._frames = 0
        return np.full((_SIDE, _SIDE), 0, np.uint8), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._frames += 1
        image = np.full((_SIDE, _SIDE), self._frames, np.uint8)
        return image, 1.0, self._frames == _EPISODE, False, {}


def make_cartpole() -> Env:
    """CartPole-v1 as ``gymnasium.make`` has it."""
    return gym.make("CartPole-v1")


def make_spinning() -> Env:
    """1 ms of CPU a step."""
    return SlowEnv(0.001, spin=True)


def make_sleeping() -> Env:
    """5 ms of sleep a step."""
    return SlowEnv(0.005, spin=False)


def make_drowsy() -> Env:
    """20 ms of sleep a step: slow enough to watch who waits for it."""
    return SlowEnv(0.02, spin=False)


def make_trivial() -> Env:
    """Steps that take no time to speak of."""
    return SlowEnv(0.0, spin=True)


def make_breakout() -> Env:
    """``ALE/Breakout-v5``, the usual preprocessing: uint8 ``[4, 84, 84]``, 4 frames skipped."""
    gym.register_envs(importlib.import_module("ale_py"))
    env = gym.make("ALE/Breakout-v5", frameskip=1)
    return gym.wrappers.FrameStackObservation(gym.wrappers.AtariPreprocessing(env), 4)


def make_cheetah() -> Env:
    """HalfCheetah-v5: float64 ``[17]``, 6 numbers as the action."""
    return gym.make("HalfCheetah-v5")


def make_big() -> Env:
    """1 MiB an observation."""
    return BigEnv()


def small_policy() -> nn.Module:
    """4 numbers, 2 actions."""
    return CategoricalPolicy(mlp(4, 2))


def cnn_policy() -> nn.Module:
    """84x84x4 uint8, 4 actions; a small CNN."""
    body = nn.Sequential(
        Bytes(),
        nn.Conv2d(4, 16, 8, stride=4),
        nn.ReLU(),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2592, 256),
        nn.ReLU(),
        nn.Linear(256, 4),
    )
    return CategoricalPolicy(body)


def cheetah_policy() -> nn.Module:
    """17 numbers, 6 actions."""
    return GaussianPolicy(17, 6)


def corner_policy() -> nn.Module:
    """Looks at 64 pixels."""
    return CategoricalPolicy(nn.Sequential(Corner(), mlp(_PIXELS, 2)))


_CARTPOLE = (make_cartpole, small_policy)
_MLP = "CartPole-v1, 64x64 MLP"

WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload("cartpole-1", f"{_MLP}, 1 env", *_CARTPOLE, 1, 1024),
        Workload("cartpole-16", f"{_MLP}, 16 envs", *_CARTPOLE, 16, 256),
        Workload("cartpole-64", f"{_MLP}, 64 envs", *_CARTPOLE, 64, 64),
        Workload("spin-1ms", "1 ms of CPU a step", make_spinning, small_policy, 1, 128),
        Workload("sleep-5ms", "5 ms of sleep a step", make_sleeping, small_policy, 1, 32),
        Workload(
            "atari",
            "ALE/Breakout-v5, 84x84x4 uint8, small CNN, 4 envs",
            make_breakout,
            cnn_policy,
            4,
            64,
            ("ale_py", "cv2"),
        ),
        Workload(
            "mujoco",
            "HalfCheetah-v5, 64x64 MLP, 4 envs",
            make_cheetah,
            cheetah_policy,
            4,
            128,
            ("mujoco",),
        ),
        Workload("big-obs", "1 MiB uint8 observations", make_big, corner_policy, 1, 32),
    )
}
