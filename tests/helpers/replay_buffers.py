"""A small replay buffer, and checks of collectors that fill it in the background."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

T = 8


class Buffer:
    """A list of frames: the smallest class that works as a replay buffer."""

    def __init__(self) -> None:
        self.frames: list[TensorDict] = []
        self.inserts: list[int] = []

    def extend(self, data: TensorDict) -> None:
        self.frames.extend(data.unbind(0))
        self.inserts.append(len(data))

    def sample(self, batch_size: int) -> TensorDict:
        indices = torch.randint(len(self.frames), (batch_size,)).tolist()
        return torch.stack([self.frames[index] for index in indices])

    def __len__(self) -> int:
        return len(self.frames)


class KeepingBuffer:
    """A replay buffer that keeps what it is given; with a storage of TorchRL's, if there is one."""

    def __init__(self, **storage: Any) -> None:
        self.added: list[TensorDict] = []
        if storage:
            data = pytest.importorskip("torchrl.data")
            self.storage = data.LazyTensorStorage(1000, **storage)

    def extend(self, data: TensorDict) -> None:
        self.added.append(data)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [tuple(data.shape) for data in self.added]
