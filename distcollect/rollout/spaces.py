"""Gymnasium spaces as flat lists of tensor leaves, and values to and from them.

A space is a tree: Dict and Tuple are its branches, and each end is a leaf of fixed shape and dtype.
A leaf's key is the path to it (a Tuple's entries are called "0", "1", ...); a space that is itself
a leaf gets the name of its role, "observation" or "action", as its whole key.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces

from distcollect.errors import SpaceError

Key = tuple[str, ...]
Arrays = dict[Key, np.ndarray]  # one array for each leaf, in the leaves' order

# Names that a batch uses itself, so that an entry of a Dict observation can't have them.
RESERVED = frozenset({"action", "collector", "done", "next", "reward", "terminated", "truncated"})


@dataclass(frozen=True)
class Leaf:
    """One tensor of a batch: its key, and its shape and dtype in a single frame."""

    key: Key
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The same dtype, as numpy names it."""
        return torch.empty(0, dtype=self.dtype).numpy().dtype

    def zeros(self, *lead: int) -> np.ndarray:
        """A zeroed array ``[*lead, *shape]``."""
        return np.zeros((*lead, *self.shape), self.numpy_dtype)

    def __str__(self) -> str:
        return f"{'.'.join(self.key)} {list(self.shape)} {str(self.dtype).removeprefix('torch.')}"


class Entries(spaces.Dict):
    """A Dict space of actions, or of outcomes, whose entries are at the top level of a batch."""


def torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    """The torch dtype of the same name as ``dtype``, in this machine's byte order.

    Raises:
        TypeError: torch has none, as for strings, objects and long doubles.
    """
    return torch.from_numpy(np.empty(0, dtype.newbyteorder("="))).dtype


# torch can't write to tensors of these dtypes by index or mask.
_SAME_SIZE = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def indexable(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, as a dtype of the same size that torch can write to by index or mask."""
    return tensor.view(_SAME_SIZE.get(tensor.dtype, tensor.dtype))


def can_be_indexed(dtype: torch.dtype) -> bool:
    """Whether torch can write to tensors of this dtype by index or mask."""
    return dtype not in _SAME_SIZE


def leaves_of(space: gym.Space[Any], role: str) -> tuple[Leaf, ...]:
    """The leaves of ``space``, depth first, in the space's own order.

    Args:
        space: an observation or action space of a single env.
        role: "observation" or "action". For an action, and for a Tuple, it is the first part of
            each key; the entries of a Dict observation, and of :class:`Entries`, stand at the top
            level.

    Raises:
        SpaceError: a part of the space has no fixed shape (Text, Graph, Sequence, OneOf), or an
            entry has a name that the batch needs for itself.
    """
    top_level = isinstance(space, spaces.Dict if role == "observation" else Entries)
    if role == "observation" and isinstance(space, spaces.Dict):
        for name in space:
            if name in RESERVED:
                raise SpaceError(
                    f"the observation space has an entry {name!r}, a name that batches need for "
                    f"themselves; rename it in a wrapper (reserved: {', '.join(sorted(RESERVED))})"
                )
    start = () if top_level else (role,)
    return tuple(_leaf((*start, *map(str, path)), part, role) for path, part in leaf_spaces(space))


def _leaf(key: Key, space: gym.Space[Any], role: str) -> Leaf:
    where = ".".join(key) or role
    match space:
        case spaces.Discrete():
            return Leaf(key, (), torch.int64)
        case gym.Space(shape=tuple(shape), dtype=np.dtype() as dtype):
            try:
                return Leaf(key, shape, torch_dtype(dtype))
            except TypeError as err:
                raise SpaceError(
                    f"{where}: torch has no dtype {dtype}, so no batch can carry it; convert it in "
                    "a wrapper"
                ) from err
    raise SpaceError(
        f"{where}: a {type(space).__name__} space has no fixed shape and dtype, so no batch can "
        "carry it; turn it into Box, Discrete, MultiDiscrete, MultiBinary, Dict or Tuple in a "
        "wrapper"
    )


def leaf_spaces(
    space: gym.Space[Any], path: tuple[str | int, ...] = ()
) -> Iterator[tuple[tuple[str | int, ...], gym.Space[Any]]]:
    """Each leaf space with its path: the keys and indices that lead to its part of a value.

    In the leaves' order, so that hot code can walk a value without walking the space again.
    """
    match space:
        case spaces.Dict():
            for name, part in space.items():
                yield from leaf_spaces(part, (*path, name))
        case spaces.Tuple():
            for index, part in enumerate(space):
                yield from leaf_spaces(part, (*path, index))
        case _:
            yield path, space


def flatten(space: gym.Space[Any], value: Any) -> Iterator[Any]:
    """The parts of ``value``, one for each leaf of ``space``, in the leaves' order.

    Works for one value and for a batch of values (a vector env's), as it only walks the tree.
    """
    match space:
        case spaces.Dict():
            for name, part in space.items():
                yield from flatten(part, value[name])
        case spaces.Tuple():
            for part, item in zip(space, value, strict=True):
                yield from flatten(part, item)
        case _:
            yield value


def unflatten(space: gym.Space[Any], parts: Iterator[Any]) -> Any:
    """The inverse of :func:`flatten`: takes from ``parts`` as many as ``space`` has leaves."""
    match space:
        case spaces.Dict():
            return {name: unflatten(part, parts) for name, part in space.items()}
        case spaces.Tuple():
            return tuple(unflatten(part, parts) for part in space)
        case _:
            return next(parts)


def limits_of(space: gym.Space[Any]) -> tuple[Any, Any] | None:
    """The lowest and the highest value of a leaf space of whole numbers; None for a Box."""
    match space:
        case spaces.Discrete(start=start, n=n):
            return int(start), int(start + n - 1)
        case spaces.MultiDiscrete(start=start, nvec=nvec):
            return start, start + nvec - 1
        case spaces.MultiBinary():
            return 0, 1
    return None


def nested(flat: Mapping[Key, Any]) -> dict[str, Any]:
    """``{("a", "b"): x}`` as ``{"a": {"b": x}}``."""
    tree: dict[str, Any] = {}
    for (*parents, name), value in flat.items():
        branch = tree
        for part in parents:
            branch = branch.setdefault(part, {})
        branch[name] = value
    return tree


def as_key(name: str | Key) -> Key:
    """An entry's name in a TensorDict as a key."""
    return (name,) if isinstance(name, str) else name


def overlaps(key: Key, others: Iterable[Key]) -> bool:
    """Whether a tree with these other leaves can't have the leaf ``key`` too."""
    return any(key[: len(other)] == other[: len(key)] for other in others)


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as users write it, for example "float32"."""
    return str(dtype).removeprefix("torch.")
