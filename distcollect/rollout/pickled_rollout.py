"""The frames of TorchRL envs with entries that have no fixed shape, or that are no tensors."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import cloudpickle
import numpy as np
import torch
from tensordict import TensorDictBase, lazy_stack

from distcollect.errors import EnvError
from distcollect.rollout.layout import Layout
from distcollect.rollout.spaces import Key
from distcollect.rollout.tree_slab import FrameSlab


class PickledRollout(FrameSlab):
    """Keeps the TensorDicts of one rollout ``[n, T]`` as they are.

    They travel as one pickle, which is slow, but carries everything that can be pickled.
    """

    def __init__(self, layout: Layout, num_steps: int, *, shared: bool | None = False) -> None:
        super().__init__(layout, num_steps, shared=shared)
        self._frames: list[TensorDictBase] = []

    def clear(self) -> None:
        super().clear()
        self._frames = []

    def write(self, start: int, frames: Sequence[TensorDictBase], given: set[Key]) -> None:
        self._frames += frames
        rows, keys = self._rows, self.layout.torchrl_keys
        assert keys is not None
        for step, frame in enumerate(frames, start):
            total = np.zeros(rows)
            for key in keys.rewards:
                reward = frame.get(("next", *key))
                total += reward.reshape(rows, -1).sum(-1, dtype=torch.float64).cpu().numpy()
            self.reward[:, step] = total

    def finish(self, num_steps: int) -> None:
        # Copies, as what is written into one frame of a lazy stack must not change another.
        self._frames += [self._frames[-1].clone() for _ in range(self.num_steps - num_steps)]
        super().finish(num_steps)

    def values_at(self, key: Key, at: np.ndarray) -> np.ndarray:
        """One number of each of k frames, float64 ``[k]``; see :meth:`.Slab.values_at`.

        Raises:
            EnvError: a frame has no such entry with one number.
        """
        values = np.empty(len(at))
        for index, (row, step) in enumerate(zip(*divmod(at, self.num_steps), strict=True)):
            value = self._frames[step].get(key, None)
            if not isinstance(value, torch.Tensor) or value.numel() != self.layout.num_envs:
                raise EnvError(
                    f"Monitor(metrics=...): a frame has no entry {key} with one number for each env"
                )
            values[index] = value.reshape(-1)[row]
        return values

    def local_tensors(self) -> list[Any]:
        """The bookkeeping, and the frames as one TensorDict ``[*batch_size, T]``."""
        return [*self._memory, _on_cpu(stacked(self._frames, -1))]

    def tensors(self, *, mapped: bool = True) -> list[torch.Tensor]:
        """The bookkeeping, and the frames pickled, uint8 ``[N]``."""
        return [*self._memory, packed(stacked(self._frames, -1))]


def packed(frames: TensorDictBase) -> torch.Tensor:
    """Frames as they travel: pickled, uint8 ``[N]``, on the CPU, as a trainer may have no GPU."""
    return torch.frombuffer(bytearray(cloudpickle.dumps(_on_cpu(frames))), dtype=torch.uint8)


def _on_cpu(frames: TensorDictBase) -> TensorDictBase:
    # Not by looking at the entries: to read one that has no fixed shape is an error.
    moved = frames.to("cpu")
    return moved if frames.device is not None else moved.clear_device_()


def unpacked(tensors: Sequence[Any]) -> TensorDictBase:
    """The frames ``[*batch_size, T]`` of a rollout of a :class:`PickledRollout`."""
    frames = tensors[-1]
    if isinstance(frames, torch.Tensor):
        frames = pickle.loads(frames.numpy().tobytes())
    assert isinstance(frames, TensorDictBase)
    return frames


def stacked(parts: Sequence[TensorDictBase], dim: int) -> TensorDictBase:
    """The parts as one TensorDict with a new dimension; a lazy stack if their shapes differ."""
    try:
        return torch.stack(list(parts), dim)
    except RuntimeError:
        # As a whole, also if the shapes differ only in a nested TensorDict.
        return lazy_stack(list(parts), dim)
