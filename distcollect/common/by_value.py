"""Pickles what scripts and notebooks define by value, also functions that keep their results."""

from __future__ import annotations

import functools
import io
import sys
from collections import ChainMap
from operator import attrgetter
from typing import Any

import cloudpickle

_Cached: Any = type(functools.cache(len))


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle declares no types
    """Cloudpickle's, which sends functions with ``lru_cache`` or ``cache`` by their names."""


def dumps(value: object) -> bytes:
    """``value``, pickled by :class:`Pickler`."""
    file = io.BytesIO()
    Pickler(file).dump(value)
    return file.getvalue()


def _reduced(cached: Any) -> str | tuple[object, ...]:
    """By name if it can be imported elsewhere; else its function by value, without the results."""
    module = cached.__module__
    if module != "__main__" and module not in cloudpickle.list_registry_pickle_by_value():
        try:
            if attrgetter(cached.__qualname__)(sys.modules[module]) is cached:
                return str(cached.__qualname__)
        except (KeyError, AttributeError):
            pass  # as of a function within a function
    return _with_cache, (cached.__wrapped__, cached.cache_parameters())


def _with_cache(function: Any, parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


Pickler.dispatch_table = ChainMap({_Cached: _reduced}, cloudpickle.Pickler.dispatch_table)
