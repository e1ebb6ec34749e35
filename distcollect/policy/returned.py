"""Turns values that a policy returned into arrays that a batch can hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from distcollect.errors import PolicyError
from distcollect.rollout.spaces import Key, Leaf, dtype_name


def to_tensor(value: Any, key: Key) -> torch.Tensor:
    """Return ``value`` as a tensor that numpy can view: on the CPU, without gradients, no bfloat16.

    Raises:
        PolicyError: torch can't make a tensor of it.
    """
    if not isinstance(value, torch.Tensor):
        try:
            value = torch.as_tensor(value)
        except (RuntimeError, TypeError, ValueError) as err:
            kind = "None" if value is None else type(value).__name__
            raise PolicyError(
                f"the policy returned {kind} as {'.'.join(key)!r}, which is not a tensor or "
                "array-like: return one (None: is its `return` missing?)"
            ) from err
    if value.requires_grad:  # also within no_grad(): a view of a parameter
        value = value.detach()
    if not value.is_cpu:
        value = value.cpu()
    tensor: torch.Tensor = value.float() if value.dtype is torch.bfloat16 else value
    return tensor


def fitted(value: Any, leaf: Leaf, shape: torch.Size) -> np.ndarray | None:
    """Return ``value`` as an array whose numbers the leaf's dtype can hold.

    None: it has another shape, or is an integer instead of a float, or the reverse. Floats and
    integers may have another width.

    Args:
        value: a tensor, or what torch makes one of.
        leaf: what it is for.
        shape: of the leaf, for all envs: ``[n, *leaf.shape]``.

    Raises:
        PolicyError: torch can't make a tensor of it, or it has an integer that is out of range.
    """
    array: np.ndarray
    if type(value) is torch.Tensor and value.dtype is leaf.dtype and value.shape == shape:
        try:
            array = value.numpy()
        except (RuntimeError, TypeError):  # it needs a gradient, or is on a GPU
            pass
        else:
            return array
    tensor = to_tensor(value, leaf.key)
    if tensor.shape != shape:
        return None
    got, wanted = tensor.dtype, leaf.dtype
    if got is not wanted:
        if got.is_floating_point != wanted.is_floating_point or got.is_complex != wanted.is_complex:
            return None
        if not (got.is_floating_point or got.is_complex) and tensor.numel():
            limits = None if wanted is torch.bool else torch.iinfo(wanted)
            low, high = (0, 1) if limits is None else (limits.min, limits.max)
            for number in (int(tensor.min()), int(tensor.max())):
                if not low <= number <= high:
                    raise PolicyError(
                        f"the policy returned {number} in {'.'.join(leaf.key)!r}, which is of "
                        f"dtype {dtype_name(wanted)} and holds {low} to {high}"
                    )
    array = tensor.numpy()
    return array
