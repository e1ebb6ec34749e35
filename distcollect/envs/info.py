"""Entries of ``info`` as parts of a frame: their spaces, given or found out by trying."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

from distcollect.envs.base import InfoKeys, Space, describe
from distcollect.errors import ArgumentError, ArgumentTypeError, EnvError, SpaceError
from distcollect.rollout.spaces import RESERVED, leaf_spaces, leaves_of

EPISODE = "episode"
# Where the values of these entries come from is documented, so nobody has to declare them.
_KNOWN_INFO: dict[str, Space] = {
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
    """The space of the info entries that frames carry, as far as need be found out by trying."""
    if isinstance(info_keys, str):
        raise ArgumentTypeError(
            f"info_keys={info_keys!r}: must be a list of names, as ['success'], or a dict of "
            "their spaces by name"
        )
    declared = info_keys if isinstance(info_keys, Mapping) else dict.fromkeys(info_keys or ())
    observed = {leaf.key[0] for leaf in leaves_of(observation_space, "observation")}
    for name in declared:
        if name in RESERVED or name in observed:
            raise ArgumentError(
                f"info_keys: {name!r} is the name of something else in a batch; give that entry "
                "of info another name in a wrapper"
            )
    found: dict[str, Any] = {
        name: _KNOWN_INFO.get(name) if space is None else space for name, space in declared.items()
    }
    if None in found.values():
        _find_out(found, examples, env_name)
    for name, space in found.items():
        if any(isinstance(part, int) for way, _ in leaf_spaces(space) for part in way):
            raise SpaceError(f"info_keys: {name!r} is a Tuple space; only Dict can be nested here")
    return spaces.Dict(found)


def _find_out(
    found: dict[str, Any], examples: Callable[[], Iterator[Mapping[str, Any]]], env_name: str
) -> None:
    """Put in the spaces that are None as yet, from what the env gives."""
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
            f"{env_name}: trying it for its info entries raised {describe(err)}"
        ) from err
    name = next(name for name, space in found.items() if space is None)
    raise ArgumentError(
        f"info_keys: a reset and a step of {env_name} gave nothing under {name!r} that "
        f"shows a shape and dtype (entries seen: {', '.join(sorted(seen)) or 'none'}); "
        f"declare it: info_keys={{{name!r}: gymnasium.spaces.Box(...)}}"
    )


def _space_of(value: Any) -> Space | None:
    """A space that ``value`` may be from; None if no tensor can hold it."""
    if isinstance(value, Mapping):
        parts = {str(name): _space_of(part) for name, part in value.items()}
        known = {name: part for name, part in parts.items() if part is not None}
        return spaces.Dict(known) if known and len(known) == len(parts) else None
    if not isinstance(value, bool | int | float | np.generic | np.ndarray):
        return None
    array = np.asarray(value)
    # A Python float has no precision of its own; np.float64 scalars count as such.
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
    """Of each entry of a vector env's infos, the value of the first row that has it."""
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
