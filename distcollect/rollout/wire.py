"""How a rollout lies in the tensors that travel: small leaves share one, large ones have their own.

A worker's :class:`~distcollect.rollout.slab.Slab` allocates these tensors and writes into them;
:func:`~distcollect.rollout.assemble.assemble` reads them on the trainer. Both work out the same
:class:`WireLayout` from the layout of a frame, the number of steps and the form in the header.
"""

from __future__ import annotations

import functools
import itertools
import math
import pickle
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from distcollect.common import tensor_cache
from distcollect.common.shared_memory import SharedTensor, SharedTensors, allocate
from distcollect.rollout.layout import Layout, Tensors

V = TypeVar("V")

# Smaller leaves travel together in one tensor: each further tensor costs some 0.1 ms on the wire.
# Larger leaves have a tensor each, as these are copied side by side.
_PACKED_BELOW_BYTES = 256 * 1024
_ALIGNMENT = 16
# The packed leaves of several rollouts are copied into one tensor first if they are smaller: then a
# leaf of all of them is taken out by one operation, which saves more time than the copy takes.
_STACKED_BELOW_BYTES = 64 * 1024


class WireForm(Enum):
    """Which leaves have a tensor of their own.

    Attributes:
        PACKED: large leaves; the small ones are packed into the first tensor.
        MAPPED: all leaves, in shared memory that a trainer on the same host can map. No leaf is
            packed, as none is sent.
        LOCAL: all leaves, as the rollout stays in its process.
    """

    PACKED = "packed"
    MAPPED = "mapped"
    LOCAL = "local"


class _Place(NamedTuple):
    """Where a leaf lies: ``start`` is its first byte among the packed ones; None: it is alone."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...]
    size: int
    start: int | None


class WireLayout:
    """Where each leaf of a rollout of T steps lies in the tensors that travel.

    The first tensor, uint8 ``[N]``, holds all packed leaves, and after them the final observations
    of episodes that ended in the rollout. Each other tensor is one leaf. The leaves are those of
    every frame, ``[n, T, *shape]``, then the state ones after the last frame, ``[n, *shape]``.

    Attributes:
        form: which leaves are packed.
        packed_bytes: size of the packed leaves.
        num_bytes: size of all leaves.
    """

    def __init__(self, layout: Layout, num_steps: int, form: WireForm) -> None:
        n = layout.num_envs
        leaves = [(leaf.dtype, (n, num_steps, *leaf.shape)) for leaf in layout.per_frame]
        leaves += [(leaf.dtype, (n, *leaf.shape)) for leaf in layout.state]
        self.form = form
        self.packed_bytes = 0
        self._state = layout.state
        self._places: list[_Place] = []
        for dtype, shape in leaves:
            size = math.prod(shape) * dtype.itemsize
            is_packed = form is WireForm.PACKED and size < _PACKED_BELOW_BYTES
            start = self.packed_bytes if is_packed else None
            self._places.append(_Place(shape, dtype, _strides(shape), size, start))
            self.packed_bytes += _aligned(size) * is_packed
        self.num_bytes = sum(place.size for place in self._places)

    def allocate(self) -> tuple[Tensors, SharedTensors | None]:
        """New memory for a rollout.

        Returns:
            The tensors that travel; and with the form MAPPED, what stands for all but the first,
            by which a trainer on the same host finds them.
        """
        large = [place for place in self._places if place.start is None]
        packed = torch.zeros(self.packed_bytes, dtype=torch.uint8)
        if self.form is not WireForm.MAPPED:
            return [packed, *(tensor_cache.empty(each.shape, each.dtype) for each in large)], None
        *starts, end = itertools.accumulate((_aligned(each.size) for each in large), initial=0)
        memory, segment = allocate(end)
        places = [
            SharedTensor(segment, start, each.shape, each.dtype)
            for each, start in zip(large, starts, strict=True)
        ]
        num_bytes = sum(each.size for each in large)
        shared = SharedTensors(segment.name, num_bytes, pickle.dumps(places))
        return [packed, *(place.within(memory) for place in places)], shared

    def leaves(self, wire: Tensors) -> Tensors:
        """One tensor for each leaf, sharing the memory of ``wire``."""
        packed, *large = wire
        return self._in_order(self._unpacked(packed), large)

    def leaves_of_all(self, wires: Sequence[Tensors]) -> list[Tensors]:
        """For each leaf tensors ``[k, *shape]`` which together hold that of all k wires, in order.

        They may share the memory of ``wires``.
        """
        if not 0 < self.packed_bytes < _STACKED_BELOW_BYTES:
            of_each = [self.leaves(wire) for wire in wires]
            return [[part.unsqueeze(0) for part in parts] for parts in zip(*of_each, strict=True)]
        end = self.packed_bytes
        packed = [wire[0] if wire[0].numel() == end else wire[0][:end] for wire in wires]
        small = [[leaf] for leaf in self._unpacked(torch.cat(packed).view(len(wires), end))]
        others = zip(*(wire[1:] for wire in wires), strict=True)
        large = [[part.unsqueeze(0) for part in parts] for parts in others]
        return self._in_order(small, large)

    def _unpacked(self, packed: torch.Tensor) -> Tensors:
        """The packed leaves ``[*lead, *shape]`` in a contiguous tensor, uint8 ``[*lead, N]``."""
        by_dtype: dict[torch.dtype, torch.Tensor] = {}
        leaves: Tensors = []
        for shape, dtype, strides, _, start in self._places:
            if start is None:
                continue
            # Slicing and viewing take three times as long.
            flat = by_dtype.get(dtype)
            if flat is None:
                flat = by_dtype[dtype] = packed.view(dtype)
            lead, lead_strides = flat.shape[:-1], flat.stride()[:-1]
            offset = flat.storage_offset() + start // dtype.itemsize
            leaves.append(flat.as_strided((*lead, *shape), (*lead_strides, *strides), offset))
        return leaves

    def _in_order(self, small: Iterable[V], large: Iterable[V]) -> list[V]:
        """What belongs to the packed leaves, and to the others, in the order of all leaves."""
        of_small, of_large = iter(small), iter(large)
        return [next(of_large if each.start is None else of_small) for each in self._places]

    def with_final(
        self, packed: torch.Tensor, at: Sequence[int], final: Iterable[Sequence[Any]]
    ) -> torch.Tensor:
        """The first tensor of a rollout in which k episodes ended.

        Args:
            packed: uint8 ``[packed_bytes]``, the packed leaves.
            at: where each episode ended: row times T plus step.
            final: for each state leaf the bytes of its final values ``[k, *shape]``, in parts.

        Returns:
            uint8: ``packed``, then k, ``at`` and the final values.
        """
        rest = bytearray(np.array([len(at), *at], np.int64))
        for parts in final:
            rest += bytes(-len(rest) % _ALIGNMENT)
            rest += b"".join(parts)
        rest += bytes(-len(rest) % _ALIGNMENT)
        return torch.cat([packed, torch.frombuffer(rest, dtype=torch.uint8)])

    def final(self, packed: torch.Tensor) -> tuple[np.ndarray, list[np.ndarray]] | None:
        """What :meth:`with_final` appended; None: no episode ended.

        Returns:
            ``at``, int64 ``[k]``, and for each state leaf the bytes of its final values, uint8.
        """
        start = self.packed_bytes
        if packed.numel() == start:
            return None
        memory = packed.numpy()
        num_ends = int(memory[start : start + 8].view(np.int64)[0])
        start += 8
        at = memory[start : start + 8 * num_ends].view(np.int64)
        start = _aligned(start + 8 * num_ends)
        values = []
        for leaf in self._state:
            size = num_ends * math.prod(leaf.shape) * leaf.dtype.itemsize
            values.append(memory[start : start + size])
            start += _aligned(size)
        return at, values


@functools.lru_cache(maxsize=16)
def wire_layout(layout: Layout, num_steps: int, form: WireForm) -> WireLayout:
    """The wire layout; cached, so that it is not worked out for every batch."""
    return WireLayout(layout, num_steps, form)


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor, in elements."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
