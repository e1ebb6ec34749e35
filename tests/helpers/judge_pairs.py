"""An env whose frames have numbers, and replay buffers of every kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict
from torch import nn


class Numbered(gym.Env[Any, Any]):
    """Observes which env it is and how many steps it has made; logs each. An episode has three."""

    observation_space = gym.spaces.Dict({"shown": gym.spaces.Box(-1, np.inf, (2,), np.float64)})
    action_space = gym.spaces.Discrete(2)

    def __init__(self, log: Path, worker: int, env: int) -> None:
        self._log, self._env = log, 10 * worker + env
        self._steps = 0

    def _observed(self) -> dict[str, Any]:
        return {"shown": np.array([self._env, self._steps], np.float64)}

    def reset(self, **kwargs: Any) -> Any:
        return self._observed(), {}

    def step(self, action: Any) -> Any:
        # A frame is named by the observation that it begins with.
        with self._log.open("a") as log:
            log.write(f"{self._env} {self._steps}\n")
        self._steps += 1
        return self._observed(), 1.0, self._steps % 3 == 0, False, {}


class Marked(nn.Module):
    """Always 0; has a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, shown: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(shown), dtype=torch.int64)


class Own:
    """The smallest replay buffer."""

    def __init__(self) -> None:
        self.added: list[TensorDict] = []

    def extend(self, data: TensorDict) -> None:
        assert data.shape.numel(), "nothing is added"
        self.added.append(data)


def _torchrl(storage: str, **kwargs: Any) -> Any:
    from torchrl import data  # noqa: PLC0415 - it may be missing

    made = getattr(data, storage)(500, **kwargs)
    # Not TensorDictReplayBuffer with rows: that of TorchRL 0.14 fails for batches of one step.
    return data.ReplayBuffer(storage=made, batch_size=4)


BUFFERS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "own": Own,
    "tensors": lambda: _torchrl("LazyTensorStorage"),
    "rows": lambda: _torchrl("LazyTensorStorage", ndim=2),
    "list": lambda: _torchrl("ListStorage"),
}


def stored(buffer: Any) -> list[TensorDict]:
    """What a buffer holds."""
    if isinstance(buffer, Own):
        return buffer.added
    if not len(buffer):
        return []
    return [buffer[:]]
