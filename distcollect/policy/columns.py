"""The entries of what a policy returns, and how their values become arrays for a batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from distcollect.errors import PolicyError
from distcollect.rollout.spaces import Key, Leaf, dtype_name


class Column:
    """An entry of what the policy returns.

    Attributes:
        name: its name there.
        leaf: what it is in a frame.
        shape: its shape for all envs, ``[n, *leaf.shape]``.
        dtype: of its arrays.
    """

    def __init__(self, name: Any, leaf: Leaf, num_envs: int) -> None:
        """Describe the entry ``name`` of ``num_envs`` envs."""
        self.name, self.leaf = name, leaf
        self.shape, self.dtype = (num_envs, *leaf.shape), leaf.numpy_dtype

    def fitted(self, value: Any) -> np.ndarray | None:
        """Return ``value`` as an array whose numbers the leaf's dtype can hold.

        None: it has another shape, or is an integer instead of a float, or the reverse. Floats and
        integers may have another width.

        Args:
            value: a tensor, or what torch makes one of.

        Raises:
            PolicyError: torch can't make a tensor of it, or it has an integer that is out of range.
        """
        tensor, wanted = to_tensor(value, self.leaf.key), self.leaf.dtype
        if tensor.shape != self.shape or _kind(tensor.dtype) != _kind(wanted):
            return None
        if not any(_kind(wanted)) and tensor.dtype is not wanted and tensor.numel():
            limits = None if wanted is torch.bool else torch.iinfo(wanted)
            low, high = (0, 1) if limits is None else (limits.min, limits.max)
            for number in (int(tensor.min()), int(tensor.max())):
                if not low <= number <= high:
                    raise PolicyError(
                        f"the policy returned {number} in {'.'.join(self.leaf.key)!r}, which is of "
                        f"dtype {dtype_name(wanted)} and holds {low} to {high}"
                    )
        array: np.ndarray = tensor.numpy()
        return array


def _kind(dtype: torch.dtype) -> tuple[bool, bool]:
    return dtype.is_floating_point, dtype.is_complex


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
    tensor: torch.Tensor = value.cpu().resolve_conj().resolve_neg()
    return tensor.float() if tensor.dtype is torch.bfloat16 else tensor
