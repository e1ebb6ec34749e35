"""Memory for large tensors that is used again once the last tensor in it is gone.

The C library maps large blocks anew each time, and the kernel then zeroes every page before the
first byte is written: for a 64 MB rollout that takes longer than copying it. A batch is its user's
to keep for as long as they like; what they drop is what the next one is written to.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict, deque
from functools import partial

import numpy as np
import torch

_SMALLEST_BYTES = 1 << 20  # smaller blocks are kept by the C library itself
_KEPT = 4  # unused blocks of a size

# By size. A deque takes and gives without a lock: blocks come back from wherever tensors die, in
# the middle of anything.
_unused: dict[int, deque[np.ndarray]] = defaultdict(partial(deque, maxlen=_KEPT))


def empty(shape: tuple[int, ...], dtype: torch.dtype, *, pinned: bool = False) -> torch.Tensor:
    """As ``torch.empty``; ``pinned``: from torch's own pool of page-locked memory.

    That gives no memory out again while a copy to a GPU still reads it.
    """
    if pinned:
        return torch.empty(shape, dtype=dtype, pin_memory=True)
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < _SMALLEST_BYTES:
        return torch.empty(shape, dtype=dtype)
    unused = _unused[num_bytes]
    try:
        block = unused.pop()
    except IndexError:
        block = np.empty(num_bytes, np.uint8)
    # Tensors keep the view alive, and the view the block.
    view = block[:]
    weakref.finalize(view, unused.append, block).atexit = False
    return torch.from_numpy(view).view(dtype).view(shape)


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """As ``tensor.clone()`` of a contiguous tensor."""
    return empty(tuple(tensor.shape), tensor.dtype).copy_(tensor)


def forget() -> None:
    """Give all unused memory back to the system, and what is in use now when it is dropped."""
    _unused.clear()
