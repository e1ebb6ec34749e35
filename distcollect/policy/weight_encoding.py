"""How weights are encoded on the way to workers: which entries travel, and in which precision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from distcollect.errors import WeightsError
from distcollect.rollout.spaces import dtype_name


@dataclass(frozen=True)
class WeightEncoding:
    """How weights lie in the payload that is sent.

    Attributes:
        dtype: what wider floats are rounded to; None: they are not.
        entries: indices of the entries that travel; None: all.
    """

    dtype: torch.dtype | None = None
    entries: tuple[int, ...] | None = None

    @property
    def is_whole(self) -> bool:
        """Whether the payload is the flat buffer itself."""
        return self.dtype is None and self.entries is None

    def narrowed(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype that entries of ``dtype`` have on the way."""
        narrow = self.dtype
        if narrow is None or not dtype.is_floating_point or dtype.itemsize <= narrow.itemsize:
            return dtype
        return narrow


def check_finite(weights: Mapping[str, torch.Tensor]) -> None:
    """Refuse NaN and infinity.

    Raises:
        WeightsError: names the key.
    """
    for name, tensor in weights.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise WeightsError(
                f"{name!r} holds a NaN or an infinity (WeightSync(check_finite=True)). "
                "Nothing was sent"
            )


def check_range(weights: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
    """Refuse finite values that would become infinite as ``dtype``.

    They are refused among infinities and NaN, too, which are sent as they are.

    Raises:
        WeightsError: names the key.
    """
    limit = torch.finfo(dtype).max
    for name, tensor in weights.items():
        if tensor.is_floating_point() and tensor.numel():
            magnitudes = tensor.detach().abs().nan_to_num(nan=0.0, posinf=0.0)
            largest = float(magnitudes.max())
            if largest > limit:
                advice = (
                    "use 'bfloat16'"
                    if largest <= torch.finfo(torch.bfloat16).max
                    else f"leave it out with exclude=[{name!r}], or give no wire_dtype"
                )
                raise WeightsError(
                    f"{name!r} holds a value of magnitude {largest:g}, too large for "
                    f"WeightSync(wire_dtype={dtype_name(dtype)!r}): {advice}. Nothing was sent"
                )
