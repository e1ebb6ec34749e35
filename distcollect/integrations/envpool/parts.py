"""The private parts of EnvPool that are used, and the error where one is missing."""

from __future__ import annotations

from importlib import metadata

from distcollect.errors import ArgumentError

_NAMES = ("_from", "_recv", "_reset", "_send", "_state_keys", "_to")


def check_envpool_parts(kind: type) -> None:
    """Raise ArgumentError if a class of EnvPool's envs lacks a private part that is used."""
    if missing := [name for name in _NAMES if not hasattr(kind, name)]:
        raise ArgumentError(
            f"{kind.__name__}: EnvPool {metadata.version('envpool')} lacks {', '.join(missing)}, "
            "which is used to step its envs; use the envpool version that constraints/tested.txt "
            "names, or envs of another package"
        )
