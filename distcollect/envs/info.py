"""Finds the spaces of the ``info`` entries that frames carry."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

from distcollect.envs.base import InfoKeys, Space, describe
from distcollect.errors import ArgumentError, EnvError, SpaceError
from distcollect.rollout.spaces import RESERVED, leaf_spaces, leaves_of

EPISODE = "episode"
# Spaces of entries that Gymnasium's own wrappers write, so users need not declare them.
_KNOWN_SPACES: dict[str, Space] = {
    EPISODE: spaces.Dict(
        {
            "r": spaces.Box(-np.inf, np.inf, (), np.float32),
            "l": spaces.Box(0, np.iinfo(np.int64).max, (), np.int64),
            "t": spaces.Box(0, np.inf, (), np.float32),
        }
    )
}


def space_of_info(
    info_keys: InfoKeys | None,
    observation_space: Space,
    examples: Callable[[], Iterator[Mapping[str, Any]]],
    env_name: str,
) -> spaces.Dict:
    """Return the space of the info entries that frames carry.

    Args:
        info_keys: the entries, see :func:`~distcollect.envs.make.make_envs`.
        observation_space: of a single env; its entries' names are taken.
        examples: gives the infos of a reset and of a step, from which undeclared spaces are
            inferred. It is called only if there are any.
        env_name: for messages.

    Raises:
        ArgumentError: the name of an entry is taken, or its space can't be inferred.
        EnvError: the env raised while it was tried.
        SpaceError: the space of an entry contains a Tuple.
    """
    declared = info_keys if isinstance(info_keys, Mapping) else dict.fromkeys(info_keys or ())
    observed = {leaf.key[0] for leaf in leaves_of(observation_space, "observation")}
    for name in declared:
        if name in RESERVED or name in observed:
            raise ArgumentError(
                f"info_keys: a batch already has an entry {name!r}; rename the entry of info in "
                "a wrapper"
            )
    found: dict[str, Any] = {
        name: _KNOWN_SPACES.get(name) if space is None else space
        for name, space in declared.items()
    }
    if None in found.values():
        _infer_spaces(found, examples, env_name)
    for name, space in found.items():
        if any(isinstance(part, int) for path, _ in leaf_spaces(space) for part in path):
            raise SpaceError(f"info_keys: {name!r} is a Tuple space; only Dict can be nested here")
    return spaces.Dict(found)


def _infer_spaces(
    found: dict[str, Any], examples: Callable[[], Iterator[Mapping[str, Any]]], env_name: str
) -> None:
    """Replace each None in ``found`` by the space of that entry in one of the examples."""
    seen: set[str] = set()
    try:
        for example in examples():
            seen.update(example)
            for name, space in found.items():
                if space is None and name in example:
                    found[name] = _space_of(example[name])
            if None not in found.values():
                return
    except Exception as err:
        raise EnvError(
            f"{env_name}: a trial reset and step, for its info entries, raised {describe(err)}"
        ) from err
    name = next(name for name, space in found.items() if space is None)
    raise ArgumentError(
        f"info_keys: a reset and a step of {env_name} returned no entry {name!r} that "
        f"shows a shape and dtype (entries seen: {', '.join(sorted(seen)) or 'none'}); "
        f"declare it: info_keys={{{name!r}: gymnasium.spaces.Box(...)}}"
    )


def _space_of(value: Any) -> Space | None:
    """Return a space that contains ``value``; None if no tensor can hold it."""
    if isinstance(value, Mapping):
        parts = {str(name): _space_of(part) for name, part in value.items()}
        known = {name: part for name, part in parts.items() if part is not None}
        return spaces.Dict(known) if known and len(known) == len(parts) else None
    if not isinstance(value, bool | int | float | np.generic | np.ndarray):
        return None
    array = np.asarray(value)
    # A Python float becomes float32; np.float64 scalars are Python floats, too.
    dtype = np.dtype(np.float32) if isinstance(value, float) else array.dtype
    match dtype.kind:
        case "f":
            return spaces.Box(-np.inf, np.inf, array.shape, dtype.type)
        case "i" | "u":
            bounds = np.iinfo(array.dtype.type)
            return spaces.Box(bounds.min, bounds.max, array.shape, dtype.type)
        case "b":
            return spaces.Box(0, 1, array.shape, np.bool_)
        case _:
            return None


def first_of_each(infos: Mapping[str, Any]) -> dict[str, Any]:
    """For each entry of a vector env's infos, the value of the first row that has it."""
    first: dict[str, Any] = {}
    for name, values in infos.items():
        mask = infos.get(f"_{name}")
        if name.startswith("_") and name[1:] in infos:
            continue
        if isinstance(values, Mapping):
            first[name] = first_of_each(values)
        elif mask is None or mask.any():
            first[name] = values[0 if mask is None else int(mask.argmax())]
    return first
