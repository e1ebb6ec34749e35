"""How a rollout travels: which columns are packed together, which go alone."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable

import numpy as np
import torch

from distcollect.common import tensor_cache as recycler
from distcollect.common.shared_memory import SharedTensor, allocate
from distcollect.rollout.header import Rollout
from distcollect.rollout.layout import (
    Layout,
    Tensors,
)
from distcollect.rollout.spaces import Leaf

# A leaf that is smaller than this in a rollout travels in one tensor with its like: a tensor of its
# own costs some 0.1 ms on the wire, but large ones are copied side by side.
_PACKED_BELOW_BYTES = 256 * 1024


_ALIGNMENT = 16


class _Wire:
    """How a rollout of T steps lies in the tensors that travel.

    The first holds all small leaves, and then the final observations; each large leaf has one of
    its own. Where the receiver maps the sender's memory no leaf is sent, so none is small. A leaf
    stands here once for all frames, ``[n, T, *shape]``, and if it is a carried one again for what
    follows the last, ``[n, *shape]``.
    """

    def __init__(self, layout: Layout, num_steps: int, *, mapped: bool) -> None:
        n = layout.num_envs
        leaves = [(leaf, (n, num_steps, *leaf.shape)) for leaf in layout.per_frame]
        leaves += [(leaf, (n, *leaf.shape)) for leaf in layout.carried]
        self._shapes = [(shape, leaf.dtype) for leaf, shape in leaves]
        self._sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in self._shapes]
        self._is_small = [not mapped and size < _PACKED_BELOW_BYTES for size in self._sizes]
        self._mapped = mapped
        self._carried = layout.carried
        self.packed_bytes = sum(
            _aligned(size) for size, small in zip(self._sizes, self._is_small, strict=True) if small
        )

    def allocate(self) -> tuple[Tensors, list[SharedTensor]]:
        """New memory: the tensors that travel, and if it is mapped what travels in their place."""
        large = [
            (shape, dtype, size)
            for (shape, dtype), size, small in zip(
                self._shapes, self._sizes, self._is_small, strict=True
            )
            if not small
        ]
        packed = torch.zeros(self.packed_bytes, dtype=torch.uint8)
        if not self._mapped:
            return [packed, *(recycler.empty(shape, dtype) for shape, dtype, _ in large)], []
        memory, segment = allocate(sum(_aligned(size) for _, _, size in large))
        stand_ins: list[SharedTensor] = []
        offset = 0
        for shape, dtype, size in large:
            stand_ins.append(SharedTensor(segment, offset, shape, dtype))
            offset += _aligned(size)
        return [packed, *(stand_in.within(memory) for stand_in in stand_ins)], stand_ins

    def leaves(self, wire: Tensors) -> Tensors:
        """One tensor for each leaf, sharing the memory of ``wire``."""
        packed, *large = wire
        leaves: Tensors = []
        start = 0
        for (shape, dtype), size, small in zip(
            self._shapes, self._sizes, self._is_small, strict=True
        ):
            if small:
                leaves.append(_view(packed, start, shape, dtype))
                start += _aligned(size)
            else:
                leaves.append(large.pop(0))
        return leaves

    def with_final(
        self, packed: torch.Tensor, at: list[int], final: Iterable[np.ndarray]
    ) -> torch.Tensor:
        """``packed``; then how many episodes ended, where, and each carried leaf's final values."""
        parts = [packed]
        for array in (np.array([len(at), *at], np.int64), *final):
            flat = torch.from_numpy(array).reshape(-1).view(torch.uint8)
            parts += [flat, flat.new_zeros(_aligned(len(flat)) - len(flat))]
        return torch.cat(parts)

    def final(self, packed: torch.Tensor) -> tuple[torch.Tensor, Tensors]:
        """What :meth:`with_final` put in: int64 ``[k]``, ``[k, *shape]`` of each carried leaf."""
        start = self.packed_bytes
        if len(packed) == start:
            return torch.empty(0, dtype=torch.int64), [_none_of(leaf) for leaf in self._carried]
        num_ends = int(_view(packed, start, (1,), torch.int64))
        at = _view(packed, start, (1 + num_ends,), torch.int64)
        start += _aligned(at.nbytes)
        values: Tensors = []
        for leaf in self._carried:
            values.append(_view(packed, start, (num_ends, *leaf.shape), leaf.dtype))
            start += _aligned(values[-1].nbytes)
        return at[1:], values


@functools.lru_cache(maxsize=16)
def wire_of(layout: Layout, num_steps: int, *, mapped: bool) -> _Wire:
    """The wire form, worked out once and not for every batch."""
    return _Wire(layout, num_steps, mapped=mapped)


def _none_of(leaf: Leaf) -> torch.Tensor:
    """A tensor ``[0, *leaf.shape]``."""
    return torch.empty((0, *leaf.shape), dtype=leaf.dtype)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _view(
    flat: torch.Tensor, start: int, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    size = math.prod(shape) * dtype.itemsize
    return flat[start : start + size].view(dtype).view(shape)


def wire_of_rollout(layout: Layout, rollout: Rollout) -> _Wire:
    """The wire form in which a rollout arrived."""
    num_leaves = len(layout.per_frame) + len(layout.carried)
    mapped = len(rollout.tensors) > num_leaves
    return wire_of(layout, rollout.header.num_steps, mapped=mapped)
