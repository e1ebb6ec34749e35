"""Errors of the system become errors of an argument."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from distcollect.errors import ArgumentError


@contextlib.contextmanager
def refusing(problem: str, remedy: str, errors: Any = OSError) -> Iterator[None]:
    """Turn errors of these kinds into an ArgumentError: the problem, the error, and what to do."""
    try:
        yield
    except errors as error:
        why = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise ArgumentError(f"{problem} ({why}): {remedy}") from error
