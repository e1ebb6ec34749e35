"""Carries what the user registered with Gymnasium in the trainer's process to the workers'."""

from __future__ import annotations

import logging
import pickle
import sys
import zlib
from collections.abc import Collection
from typing import Any

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec

from distcollect.common.by_value import dumps
from distcollect.errors import ArgumentError

log = logging.getLogger(__name__)

_MAIN = "__main__"


def pickled_registry(needed: Collection[str] = ()) -> bytes:
    """Return all env ids that are registered in this process, with what makes their envs.

    What cannot be pickled is left out, unless it is needed.

    Args:
        needed: ids that must not be left out; others may be among them, which are ignored.

    Raises:
        ArgumentError: a needed one can't be pickled.
    """
    pickled: dict[str, bytes] = {}
    for env_id, spec in gym.registry.items():
        try:
            pickled[env_id] = _pickled(spec)
        except Exception as error:
            if env_id in needed:
                raise ArgumentError(
                    f"the env that was registered as {env_id!r} can't be sent to a worker "
                    f"({type(error).__name__}: {error}); pass a callable that makes it instead"
                ) from error
            log.debug("the env %r can't be sent to workers: %s", env_id, error)
    return zlib.compress(pickle.dumps(pickled))


def register_all(registry: bytes) -> None:
    """Register the ids that another process knows, as they are registered there.

    Args:
        registry: from :func:`pickled_registry`.
    """
    pickled: dict[str, bytes] = pickle.loads(zlib.decompress(registry))
    for env_id, data in pickled.items():
        try:
            if env_id in gym.registry and _pickled(gym.registry[env_id]) == data:
                continue
            spec, of_main = pickle.loads(data)
        except Exception as error:  # noqa: BLE001 - whatever the user's modules raise
            log.warning("the env %r can't be registered here: %s", env_id, error)
            continue
        gym.registry[env_id] = spec
        for name, value in of_main.items():
            setattr(sys.modules[_MAIN], name, value)


def _pickled(spec: EnvSpec) -> bytes:
    """Return a spec, and the objects of the main script that it refers to by name."""
    entry_points = [spec.entry_point, spec.vector_entry_point]
    entry_points += [wrapper.entry_point for wrapper in spec.additional_wrappers]
    of_main: dict[str, Any] = {}
    for entry_point in entry_points:
        module, _, name = str(entry_point).partition(":")
        if isinstance(entry_point, str) and module == _MAIN:
            of_main[name] = getattr(sys.modules[_MAIN], name)
    return dumps((spec, of_main))
