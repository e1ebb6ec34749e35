"""Python objects as parts of a packet: one pickle, and the memory of the tensors and arrays in it.

Tensors are neither copied nor sent within the pickle, except for small ones. Large ones arrive in
memory of :mod:`~distcollect.common.tensor_cache`.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

import torch

from distcollect.net.framing import Buffer

# A part of its own takes longer than to copy a smaller tensor.
_COPIED_BELOW_BYTES = 16 * 1024


def pack(value: object) -> list[Buffer]:
    """Return ``value`` as parts; they refer to the memory of its tensors.

    Raises:
        Exception: it can't be pickled.
    """
    file = io.BytesIO()
    views: list[memoryview] = []

    def keep(buffer: pickle.PickleBuffer) -> bool:
        """Keep a large buffer out of the pickle; True: it goes into it."""
        view = buffer.raw()
        if view.nbytes < _COPIED_BELOW_BYTES:
            return True
        views.append(view)
        return False

    _Pickler(file, protocol=5, buffer_callback=keep).dump(value)
    return [file.getbuffer(), *views]


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        return _reduced(value) if type(value) is torch.Tensor else NotImplemented


def unpack(parts: Sequence[Buffer]) -> Any:
    """Return what was packed; its tensors lie in the memory of the parts.

    Raises:
        Exception: something that it refers to can't be imported here.
    """
    return pickle.loads(parts[0], buffers=parts[1:])


def _reduced(tensor: torch.Tensor) -> Any:
    """Do as ``tensor.__reduce_ex__``, without a copy of the memory where that is possible."""
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.requires_grad:
        return tensor.__reduce_ex__(5)  # type: ignore[no-untyped-call]
    flat: Any = tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8).numpy()
    if tensor.dtype is torch.uint8 and tensor.ndim == 1 and len(flat):
        return _bytes, (pickle.PickleBuffer(flat),)
    return _tensor, (tensor.dtype, tuple(tensor.shape), pickle.PickleBuffer(flat))


def _bytes(memory: Buffer) -> torch.Tensor:
    """Make the first tensor of a rollout; it comes with most headers."""
    return torch.frombuffer(memory, dtype=torch.uint8)


def _tensor(dtype: torch.dtype, shape: tuple[int, ...], memory: Buffer) -> torch.Tensor:
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
