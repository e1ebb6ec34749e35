"""Checks of arguments that several packages share."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from distcollect.errors import ArgumentError, ArgumentTypeError


def positive(name: str, value: object, *, optional: bool = False) -> None:
    """Refuse what is no whole number above zero.

    Raises:
        ArgumentError: it is zero, negative, or None and not ``optional``.
        ArgumentTypeError: it is no integer.
    """
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentTypeError(f"{name}={value!r}: must be a whole number")
    if value < 1:
        raise ArgumentError(f"{name}={value}: must be at least 1")


def devices_among(worker_ids: object) -> list[torch.device]:
    """The devices, where workers are selected by that; else none.

    Raises:
        ArgumentTypeError: devices and numbers are mixed.
    """
    each = worker_ids if isinstance(worker_ids, list | tuple) else [worker_ids]
    devices = [item for item in each if isinstance(item, torch.device)]
    if devices and len(devices) != len(each):
        raise ArgumentTypeError(f"worker_ids={worker_ids!r}: name workers or devices, not both")
    return devices


def worker_ids(wanted: object, present: Sequence[int]) -> list[int] | None:
    """The selected workers; None: all.

    Raises:
        ArgumentTypeError: neither an int nor a list of ints.
        ArgumentError: no such worker, none at all, or one twice.
    """
    if wanted is None:
        return None
    ids = [wanted] if isinstance(wanted, int) and not isinstance(wanted, bool) else wanted
    if isinstance(ids, slice):
        ids = list(present[ids])
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
        raise ArgumentError(f"worker_ids={wanted!r}: name each worker once, and at least one")
    return list(ids)
