"""Policies and envs that tell where they compute; for tests that run on a GPU and on the CPU."""

from __future__ import annotations

import os
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from helpers.descendants import links_of
from torch import nn

import distcollect as dc


class Where(nn.Module):
    """Tells in each frame where it computes, and the lowest and highest of its weights."""

    def __init__(self, value: float = 0.0, num_floats: int = 64) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.full((num_floats,), float(value)))
        self.last = nn.Parameter(torch.full((3,), float(value)))
        self.register_buffer("count", torch.full((), int(value)))

    def fill(self, value: float) -> Where:
        with torch.no_grad():
            for tensor in self.state_dict().values():
                tensor.fill_(value)
        return self

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        n, device = len(observation), self.weights.device
        lowest, highest = torch.aminmax(torch.cat([self.weights, self.last, self.count[None]]))
        where = {
            "lowest": lowest.expand(n),
            "highest": highest.expand(n),
            "gpu": torch.full((n,), -1 if device.index is None else device.index, device=device),
        }
        return torch.zeros(n, dtype=torch.int64, device=device), where


class Sampling(nn.Module):
    """Samples an action from the weights; the observation counts for nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(2))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        probabilities = self.logits.softmax(-1).expand(len(observation), 2)
        return probabilities.multinomial(1)[:, 0]


class Pixels(gym.Env[Any, Any]):
    """Four grey images of 84 x 84; a step takes no time."""

    observation_space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    action_space = gym.spaces.Discrete(6)

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self._images = rng.integers(0, 256, (8, 4, 84, 84), dtype=np.uint8)
        self._step = 0

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        super().reset(**kwargs)
        return self._images[0], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._step += 1
        return self._images[self._step % 8], 1.0, False, self._step % 200 == 0, {}


class Reporting(gym.Wrapper[Any, Any, Any, Any]):
    """CartPole that tells what its process has of the GPU."""

    def __init__(self) -> None:
        super().__init__(gym.make("CartPole-v1"))

    def process(self) -> dict[str, Any]:
        """Its process, and what the GPU is for it."""
        return {
            "pid": os.getpid(),
            "has_context": torch.cuda.is_initialized(),
            "gpu_files": gpu_files(os.getpid()),
            "current": torch.cuda.current_device() if torch.cuda.is_initialized() else None,
        }


def gpu_files(pid: int) -> int:
    """How many files a process has open that are for computing on a GPU.

    Asking how many GPUs there are opens others.
    """
    return sum(link.startswith("/dev/nvidia-uvm") for link in links_of(pid))


def collect(
    policy: Any, num_workers: int = 2, *, num_steps: int = 8, **kwargs: Any
) -> dc.RPCDataCollector:
    """A sync collector whose envs are :class:`Reporting`; ``kwargs`` change its arguments."""
    return dc.RPCDataCollector(
        **{
            "create_env_fn": Reporting,
            "policy": policy,
            "num_workers": num_workers,
            "frames_per_batch": num_steps * num_workers,
            "sync": True,
            **kwargs,
        }
    )
