"""Memory for large tensors that is used again once the last tensor in it is gone.

The C library maps large blocks each time they are requested, and the kernel zeroes every page
before its first use: for a 64 MB rollout that takes longer than copying it. Users may keep a batch
for as long as they like; the memory of a batch that they drop is used for a later one.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections import defaultdict, deque
from functools import partial
from typing import Any

import numpy as np
import torch

_SMALLEST_BYTES = 1 << 20  # the C library itself reuses smaller blocks
_MAX_UNUSED = 4  # blocks of each size
_INTEGERS = {each.itemsize: each for each in (torch.uint8, torch.int16, torch.int32, torch.int64)}

# Unused blocks by size. A deque needs no lock: blocks come back wherever a tensor is freed, which
# may be while any lock is held.
_unused: dict[int, deque[np.ndarray]] = defaultdict(partial(deque, maxlen=_MAX_UNUSED))


def empty(shape: tuple[int, ...], dtype: torch.dtype, *, pinned: bool = False) -> torch.Tensor:
    """Do as ``torch.empty``; ``pinned``: page-locked memory from torch's own cache.

    Torch's cache doesn't reuse memory while a copy to a GPU still reads it.
    """
    if pinned:
        return torch.empty(shape, dtype=dtype, pin_memory=True)
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < _SMALLEST_BYTES:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(block(num_bytes)).view(dtype).view(shape)


def new(
    shape: tuple[int, ...], dtype: torch.dtype, *, pinned: bool = False
) -> tuple[torch.Tensor, np.ndarray]:
    """Return the same as a tensor and as an array, whose operations take a third of the time.

    Where numpy lacks the dtype, the array has integers.
    """
    if pinned or math.prod(shape) * dtype.itemsize >= _SMALLEST_BYTES:
        tensor = empty(shape, dtype, pinned=pinned)
        return tensor, array_of(tensor)
    array = np.empty(shape, array_dtype(dtype))
    return tensor_of(array, dtype), array


def array_of(tensor: torch.Tensor) -> np.ndarray:
    """The memory of a tensor as an array; of integers where numpy lacks the dtype."""
    try:
        return tensor.numpy()
    except TypeError:
        return tensor.view(_INTEGERS[tensor.dtype.itemsize]).numpy()


def tensor_of(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of :func:`array_of`; ``dtype``: the tensor's."""
    tensor = torch.from_numpy(array)
    return tensor if tensor.dtype is dtype else tensor.view(dtype)


@functools.cache
def array_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """The dtype that the array of such a tensor has."""
    return array_of(torch.empty(0, dtype=dtype)).dtype


def block(num_bytes: int) -> np.ndarray:
    """Return memory, uint8 ``[num_bytes]``; a tensor or array in it keeps it in use."""
    if num_bytes < _SMALLEST_BYTES:
        return np.empty(num_bytes, np.uint8)
    unused = _unused[num_bytes]
    try:
        memory = unused.pop()
    except IndexError:
        memory = np.empty(num_bytes, np.uint8)
    # All in this memory keep the view alive, so it is unused once the view is freed. An array made
    # from a plain slice would refer to the whole memory instead.
    view = np.frombuffer(memory.data, np.uint8)
    weakref.finalize(view, unused.append, memory).atexit = False
    return view


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """Clone a contiguous tensor into memory of this cache.

    Numpy does that on one core. Torch would take all cores, and its threads keep them in a loop for
    a while afterwards, where workers on the host need them.
    """
    copy, array = new(tuple(tensor.shape), tensor.dtype)
    array[...] = array_of(tensor)
    return copy


def forget() -> None:
    """Give unused memory back to the system; memory in use follows when it is freed."""
    _unused.clear()
