"""Writes what an env returns into arrays, and refuses what would be changed on the way.

numpy itself stretches an array that is too small, wraps integers around, cuts off fractions, and
turns None into NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

_NUMBERS = "biuf"  # kinds of dtypes: bool, signed, unsigned, float
# What each call returns, and how many values it returned in the old gym package.
_RESULTS = {
    "reset": (("observation", "info"), 1),
    "step": (("observation", "reward", "terminated", "truncated", "info"), 4),
}


class MisfitError(ValueError):
    """A value does not fit; the message describes the value."""


def write(array: np.ndarray, value: Any) -> None:
    """Write ``value`` into ``array``.

    Integers may have another dtype if the array's dtype holds each of them. Floats are rounded.

    Args:
        array: where to write.
        value: an array of the same shape, or what numpy makes one of.

    Raises:
        MisfitError: the shape is another one, or a number would be changed.
    """
    if value.__class__ is np.ndarray and value.dtype is array.dtype and value.shape == array.shape:
        array[...] = value
        return
    given = _as_array(value)
    kind, wanted = given.dtype.kind, array.dtype.kind
    if given.shape != array.shape or kind not in _NUMBERS or (kind == "f" and wanted != "f"):
        raise MisfitError(f"of shape {list(given.shape)} and dtype {given.dtype}")
    if wanted != "f":
        _check_range(array.dtype, given)
        array[...] = given
        return
    with np.errstate(over="ignore"):
        array[...] = given
    # The product is finite only if all numbers are. It is several times faster than to look at each
    # of them, and envs that return another dtype than their space's are common.
    if array.ndim == 1 and np.isfinite(array.dot(array)):
        return
    became_infinite = np.isinf(array) & np.isfinite(given)
    if became_infinite.any():
        raise _out_of_range(array.dtype, given[became_infinite].flat[0])


def number(value: Any) -> float:
    """Return the single number in ``value``: a number, or an array of one element.

    Raises:
        MisfitError: it is something else.
    """
    given = _as_array(value)
    if given.dtype.kind not in _NUMBERS:
        raise MisfitError(_described(value))
    if given.size != 1:
        raise MisfitError(f"an array of shape {list(given.shape)}")
    return float(given.reshape(()))


def flag(value: Any) -> bool:
    """Return the truth value in ``value``: a bool, 0 or 1, or an array of one such element.

    Raises:
        MisfitError: it is something else.
    """
    if value is False:
        return False
    found = number(value)
    if found not in (0.0, 1.0):
        raise MisfitError(_described(value))
    return bool(found)


def check_result(call: str, result: Any) -> None:
    """Check what ``"reset"`` or ``"step"`` of an env returned, without the observation.

    Raises:
        MisfitError: it has not the form that Gymnasium wants.
    """
    wanted, of_old_gym = _RESULTS[call]
    if not isinstance(result, tuple) or len(result) != len(wanted):
        is_tuple, given = isinstance(result, tuple), type(result).__name__
        if is_tuple:
            given = f"{len(result)} values ({', '.join(type(each).__name__ for each in result)})"
        is_old = (len(result) if is_tuple else 1) == of_old_gym
        hint = "; is it an env of the old gym package?" if is_old else ""
        raise MisfitError(f"{given}, not the {len(wanted)} ({', '.join(wanted)}){hint}")
    if not isinstance(result[-1], Mapping):
        raise MisfitError(f"{_described(result[-1])} as the info, which must be a dict")


def _as_array(value: Any) -> np.ndarray:
    try:
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError):
        raise MisfitError(f"that is no array ({_described(value)})") from None


def _described(value: Any) -> str:
    return "None" if value is None else f"{value!r:.100} of type {type(value).__name__}"


def _check_range(dtype: np.dtype[Any], given: np.ndarray) -> None:
    if not given.size or np.can_cast(given.dtype, dtype):
        return
    low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    for extreme in (given.min(), given.max()):
        if not low <= int(extreme) <= high:
            raise _out_of_range(dtype, extreme)


def _out_of_range(dtype: np.dtype[Any], value: Any) -> MisfitError:
    return MisfitError(f"with the value {value}, which {dtype} can't hold")
