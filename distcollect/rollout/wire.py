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
from typing import Any, NamedTuple

import numpy as np
import torch

from distcollect.common import tensor_cache
from distcollect.common.shared_memory import SharedTensor, SharedTensors, allocate
from distcollect.common.tensor_cache import array_dtype
from distcollect.rollout.layout import Layout, Tensors

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
        MAPPED: the same, but the small ones are packed into the second tensor. That and the large
            ones lie in shared memory that a trainer on the same host can map.
        LOCAL: all leaves, as the rollout stays in its process.
    """

    PACKED = "packed"
    MAPPED = "mapped"
    LOCAL = "local"


class _Place(NamedTuple):
    """A leaf, and its name in the record of the packed ones; "": it has a tensor of its own."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    name: str


class WireLayout:
    """Where each leaf of a rollout of T steps lies in the tensors that travel.

    The packed leaves are at the start of the first tensor, uint8 ``[N]``, or in the second one. In
    the first one the final observations follow of episodes that ended in the rollout. Each other
    tensor is one leaf. The leaves are those of every frame, ``[n, T, *shape]``, then the state ones
    after the last frame, ``[n, *shape]``.

    Attributes:
        form: which leaves are packed.
        num_bytes: size of all leaves.
    """

    def __init__(self, layout: Layout, num_steps: int, form: WireForm) -> None:
        n = layout.num_envs
        leaves = [(leaf.dtype, (n, num_steps, *leaf.shape)) for leaf in layout.per_frame]
        leaves += [(leaf.dtype, (n, *leaf.shape)) for leaf in layout.state]
        self.form = form
        self._state = layout.state
        self._places: list[_Place] = []
        self.num_bytes = 0
        names, formats, offsets, end = [], [], [], 0
        for index, (dtype, shape) in enumerate(leaves):
            size = math.prod(shape) * dtype.itemsize
            self.num_bytes += size
            is_packed = form is not WireForm.LOCAL and 0 < size < _PACKED_BELOW_BYTES
            self._places.append(_Place(shape, dtype, str(index) if is_packed else ""))
            if is_packed:
                names.append(str(index))
                formats.append((array_dtype(dtype), shape))
                offsets.append(end)
                end += _aligned(size)
        fields: Any = {"names": names, "formats": formats, "offsets": offsets, "itemsize": end}
        self._record = np.dtype(fields)
        self._final_start = end if form is WireForm.PACKED else 0
        self._first_large = 2 if form is WireForm.MAPPED else 1

    def allocate(self) -> tuple[Tensors, SharedTensors | None]:
        """New memory for a rollout.

        Returns:
            The tensors that travel; and with the form MAPPED, what stands for all but the first,
            by which a trainer on the same host finds them.
        """
        large = [(place.shape, place.dtype) for place in self._places if not place.name]
        first = torch.zeros(self._final_start, dtype=torch.uint8)
        if self.form is not WireForm.MAPPED:
            return [first, *(tensor_cache.empty(shape, dtype) for shape, dtype in large)], None
        large.insert(0, ((self._record.itemsize,), torch.uint8))
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in large]
        *starts, end = itertools.accumulate(map(_aligned, sizes), initial=0)
        memory, segment = allocate(end)
        places = [
            SharedTensor(segment, start, *each) for start, each in zip(starts, large, strict=True)
        ]
        shared = SharedTensors(segment.name, sum(sizes), pickle.dumps(places))
        return [first, *(place.within(memory) for place in places)], shared

    def leaves(self, wire: Tensors) -> Tensors:
        """One tensor for each leaf, sharing the memory of ``wire``."""
        return [
            tensor_cache.tensor_of(part[0], place.dtype) if place.name else part[0]
            for place, part in zip(self._places, self.parts([wire]), strict=True)
        ]

    def parts(self, wires: Sequence[Tensors]) -> list[Any]:
        """For each leaf what together holds that of all wires, in order.

        That is an array ``[k, *shape]``, of integers where numpy lacks the dtype; or a list of such
        arrays, or of tensors. They may share the memory of ``wires``.
        """
        large = zip(*(wire[self._first_large :] for wire in wires), strict=True)
        size = self._record.itemsize
        packed = [wire[self._first_large - 1].numpy()[:size] for wire in wires]
        if len(packed) > 1 and size < _STACKED_BELOW_BYTES:
            packed = [np.concatenate(packed)]
        if len(packed) > 1 and size:
            records = [each.view(self._record) for each in packed]
            return [[r[n] for r in records] if n else [*next(large)] for _, _, n in self._places]
        record = packed[0].view(self._record) if size else packed[0]
        return [record[name] if name else [*next(large)] for _, _, name in self._places]

    def with_final(
        self, first: torch.Tensor, at: Sequence[int], final: Iterable[Sequence[Any]]
    ) -> torch.Tensor:
        """The first tensor of a rollout in which k episodes ended.

        Args:
            first: uint8 ``[N]``, the same of a rollout in which none did.
            at: where each episode ended: row times T plus step.
            final: for each state leaf the bytes of its final values ``[k, *shape]``, in parts.

        Returns:
            uint8: ``first``, then k, ``at`` and the final values.
        """
        rest = bytearray(np.array([len(at), *at], np.int64))
        for parts in final:
            rest += bytes(-len(rest) % _ALIGNMENT)
            rest += b"".join(parts)
        rest += bytes(-len(rest) % _ALIGNMENT)
        return torch.cat([first, torch.frombuffer(rest, dtype=torch.uint8)])

    def final(self, first: torch.Tensor) -> tuple[np.ndarray, list[np.ndarray]] | None:
        """What :meth:`with_final` appended; None: no episode ended.

        Returns:
            ``at``, int64 ``[k]``, and for each state leaf its final values ``[k, *shape]``, as
            integers where numpy lacks the dtype.
        """
        start = self._final_start
        if first.numel() == start:
            return None
        memory = first.numpy()[start:]
        num_ends = int(memory[:8].view(np.int64)[0])
        end = 8 + 8 * num_ends
        at, values = memory[8:end].view(np.int64), []
        for leaf in self._state:
            start = _aligned(end)
            end = start + num_ends * math.prod(leaf.shape) * leaf.dtype.itemsize
            found = memory[start:end].view(array_dtype(leaf.dtype))
            values.append(found.reshape(num_ends, *leaf.shape))
        return at, values


@functools.lru_cache(maxsize=16)
def wire_layout(layout: Layout, num_steps: int, form: WireForm) -> WireLayout:
    """The wire layout; cached, so that it is not worked out for every batch."""
    return WireLayout(layout, num_steps, form)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
