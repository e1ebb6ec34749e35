"""Checks of arguments that several packages use."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Collection, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from distcollect.errors import ArgumentError, ArgumentTypeError

T = TypeVar("T")


def plain(value: Any) -> Any:
    """Return a scalar of numpy's or torch's as Python's number or bool, to be stored and sent.

    Anything else is returned as it is.
    """
    is_scalar = isinstance(value, np.generic | np.ndarray | torch.Tensor) and value.ndim == 0
    return value.item() if is_scalar else value


def positive(name: str, value: object, *, optional: bool = False) -> None:
    """Raise unless ``value`` is a whole number above zero, or None if it is ``optional``.

    Raises:
        ArgumentError: it is zero or negative.
        ArgumentTypeError: it is not an integer.
    """
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentTypeError(f"{name}={value!r}: must be a whole number")
    if value < 1:
        raise ArgumentError(f"{name}={value}: must be at least 1")


def above_zero(what: str, value: Any) -> None:
    """Raise unless ``value`` is a number above zero; infinity is one.

    Args:
        what: how the error names it, with the value.
        value: what was given.

    Raises:
        ArgumentError: it is not above 0.
        ArgumentTypeError: it is no number.
    """
    number(what, value)
    if not value > 0:
        raise ArgumentError(f"{what}: must be above 0")


def number(what: str, value: Any, kind: str = "a number") -> None:
    """Raise ArgumentTypeError unless ``value`` is a number."""
    if isinstance(value, bool) or not isinstance(value, float | int):
        raise ArgumentTypeError(f"{what}: must be {kind}")


# Waits of Python and of torch overflow with times that are far longer.
_LONGEST_S = 1e8


def seconds(what: str, value: Any) -> float:
    """Return a number of seconds that a wait can have as its limit, as Python's.

    Args:
        what: how the error names it, with the value.
        value: what was given.

    Raises:
        ArgumentError: it is not above 0, or above 1e8.
        ArgumentTypeError: it is no number.
    """
    limit_s: float = plain(value)
    number(what, limit_s, "a number of seconds")
    if not 0 < limit_s <= _LONGEST_S:
        raise ArgumentError(f"{what}: must be above 0 seconds, and at most 1e8 (three years)")
    return limit_s


def devices_among(worker_ids: object) -> list[torch.device]:
    """Return the devices in ``worker_ids``, if workers are selected by device; else an empty list.

    Raises:
        ArgumentTypeError: ``worker_ids`` mixes devices and numbers.
    """
    each = worker_ids if isinstance(worker_ids, list | tuple) else [worker_ids]
    devices = [item for item in each if isinstance(item, torch.device)]
    if devices and len(devices) != len(each):
        raise ArgumentTypeError(f"worker_ids={worker_ids!r}: give worker ids or devices, not both")
    return devices


def worker_ids(wanted: object, present: Sequence[int]) -> list[int] | None:
    """Return the ids of the selected workers; None: all workers.

    Args:
        wanted: what the user selected: an id, a list of ids, a slice of ``present``, or None.
        present: ids of the workers that there are.

    Raises:
        ArgumentTypeError: ``wanted`` is none of these.
        ArgumentError: ``wanted`` has an unknown id, no id at all, or one twice.
    """
    if wanted is None:
        return None
    ids: Any = wanted.tolist() if isinstance(wanted, np.ndarray | torch.Tensor) else plain(wanted)
    if isinstance(ids, int) and not isinstance(ids, bool):
        ids = [ids]
    elif isinstance(ids, slice):
        ids = list(present[ids])
    elif isinstance(ids, list | tuple):
        ids = [plain(each) for each in ids]
    if not isinstance(ids, Sequence) or not all(
        isinstance(i, int) and not isinstance(i, bool) for i in ids
    ):
        raise ArgumentTypeError(f"worker_ids={wanted!r}: must be an int or a list of ints")
    unknown = [i for i in ids if i not in present]
    if unknown:
        raise ArgumentError(
            f"worker_ids={wanted!r}: no worker {unknown}; there are {list(present)}"
        )
    if not ids or len(set(ids)) != len(ids):
        raise ArgumentError(
            f"worker_ids={wanted!r}: list at least one worker, and each worker once"
        )
    return list(ids)


def unknown_argument(name: str, known: Collection[str]) -> str:
    """Return the message for an argument that doesn't exist: first the name that may be meant."""
    return f"no argument {name!r}{did_you_mean(name, known)}; there are: {', '.join(sorted(known))}"


def did_you_mean(name: str, known: Collection[str]) -> str:
    """Return the question for the name that may be meant, in brackets; "" if none is near."""
    meant = {"num_envs": "envs_per_worker"}.get(name)  # its name in other libraries
    near = [meant] if meant in known else difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def suggests_names(kind: type[T]) -> type[T]:
    """Have a dataclass raise :class:`ArgumentTypeError` for an unknown field, with a suggestion.

    It also takes scalars of numpy and torch as numbers.
    """
    init = kind.__init__
    known = [each.name for each in dataclasses.fields(kind) if each.init]  # type: ignore[arg-type]

    @functools.wraps(init)
    def checked(self: T, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in known:
                raise ArgumentTypeError(f"{kind.__name__}: {unknown_argument(name, known)}")
        init(self, *map(plain, args), **{name: plain(value) for name, value in kwargs.items()})

    kind.__init__ = checked  # type: ignore[method-assign,assignment]
    return kind
