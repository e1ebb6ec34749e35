"""How a rollout lies in the tensors that travel: small leaves share one, large ones have their own.

A worker's :class:`~distcollect.rollout.slab.Slab` allocates these tensors and writes into them;
:func:`~distcollect.rollout.assemble.assemble` reads them on the trainer. Both work out the same
:class:`WireLayout` from the layout of a frame, the number of steps and the form in the header.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from enum import Enum

import numpy as np
import torch

from distcollect.common import tensor_cache
from distcollect.common.shared_memory import SharedTensor, allocate
from distcollect.rollout.layout import Tensors
from distcollect.rollout.spaces import Leaf
from distcollect.rollout.tree_layout import AnyLayout

# Smaller leaves travel together in one tensor: each further tensor costs some 0.1 ms on the wire.
# Larger leaves have a tensor each, as these are copied side by side.
_PACKED_BELOW_BYTES = 256 * 1024
_ALIGNMENT = 16


class WireForm(Enum):
    """Which leaves have a tensor of their own.

    Attributes:
        PACKED: large leaves; the small ones are packed into the first tensor.
        MAPPED: all leaves, in shared memory that a trainer on the same host can map. No leaf is
            packed, as none is sent.
    """

    PACKED = "packed"
    MAPPED = "mapped"


class WireLayout:
    """Where each leaf of a rollout of T steps lies in the tensors that travel.

    The first tensor, uint8 ``[N]``, holds all packed leaves, and after them the final observations
    of episodes that ended in the rollout. Each other tensor is one leaf. The leaves are those of
    every frame, ``[n, T, *shape]``, then the carried ones after the last frame, ``[n, *shape]``.

    Attributes:
        form: which leaves are packed.
        packed_bytes: size of the packed leaves.
    """

    def __init__(self, layout: AnyLayout, num_steps: int, form: WireForm) -> None:
        mapped = form is WireForm.MAPPED
        n = layout.num_envs
        leaves = [(leaf, (n, num_steps, *leaf.shape)) for leaf in layout.per_frame]
        leaves += [(leaf, (n, *leaf.shape)) for leaf in layout.carried]
        self._shapes = [(shape, leaf.dtype) for leaf, shape in leaves]
        self._sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in self._shapes]
        self._is_small = [not mapped and size < _PACKED_BELOW_BYTES for size in self._sizes]
        self.form = form
        self._carried = layout.carried
        self.packed_bytes = sum(
            _aligned(size) for size, small in zip(self._sizes, self._is_small, strict=True) if small
        )

    def allocate(self) -> tuple[Tensors, list[SharedTensor]]:
        """New memory for a rollout.

        Returns:
            The tensors that travel; and with the form MAPPED, a stand-in for each but the first,
            by which a trainer on the same host finds it.
        """
        large = [
            (shape, dtype, size)
            for (shape, dtype), size, small in zip(
                self._shapes, self._sizes, self._is_small, strict=True
            )
            if not small
        ]
        packed = torch.zeros(self.packed_bytes, dtype=torch.uint8)
        if self.form is WireForm.PACKED:
            return [packed, *(tensor_cache.empty(shape, dtype) for shape, dtype, _ in large)], []
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
        """The first tensor of a rollout in which k episodes ended.

        Args:
            packed: uint8 ``[packed_bytes]``, the packed leaves.
            at: where each episode ended: row times T plus step.
            final: for each carried leaf its final values, ``[k, *shape]``.

        Returns:
            uint8: ``packed``, then k, ``at`` and the final values.
        """
        tensors = (torch.from_numpy(array) for array in final)
        return self.with_final_tensors(packed, torch.from_numpy(np.array(at)), tensors)

    def with_final_tensors(
        self, packed: torch.Tensor, at: torch.Tensor, final: Iterable[torch.Tensor]
    ) -> torch.Tensor:
        """The same as :meth:`with_final`, with ``at`` as int64 ``[k]`` and tensors as values."""
        parts = [packed]
        for tensor in (torch.cat([torch.tensor([len(at)]), at]), *final):
            flat = tensor.contiguous().reshape(-1).view(torch.uint8)
            parts += [flat, flat.new_zeros(_aligned(len(flat)) - len(flat))]
        return torch.cat(parts)

    def final(self, packed: torch.Tensor) -> tuple[torch.Tensor, Tensors]:
        """What :meth:`with_final` appended: ``at``, int64 ``[k]``, and the final values."""
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
def wire_layout(layout: AnyLayout, num_steps: int, form: WireForm) -> WireLayout:
    """The wire layout; cached, so that it is not worked out for every batch."""
    return WireLayout(layout, num_steps, form)


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
