"""Where a collector meets the user's code: lines that warnings name, functions that are called."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from distcollect.errors import ArgumentError

_Result = TypeVar("_Result")


def users_stack_level() -> int:
    """The ``stacklevel`` with which the calling function warns about the user's own line."""
    level, frame = 0, inspect.currentframe()
    # By module: the code of a dataclass's __init__ has no file.
    while frame is not None and frame.f_globals.get("__name__", "").startswith("distcollect."):
        level, frame = level + 1, frame.f_back
    return level


def without_stop(function: Callable[..., _Result], *args: Any, **kwargs: Any) -> _Result:
    """Call ``function``, which calls functions of the user's.

    Raises:
        ArgumentError: one of them raised StopIteration, which would end a loop over the collector
            as if it were complete.
    """
    try:
        return function(*args, **kwargs)
    except StopIteration as error:
        *_, (frame, line) = traceback.walk_tb(error.__traceback__)
        code = frame.f_code
        raise ArgumentError(
            f"{code.co_name}() in {code.co_filename}:{line} raised StopIteration: {error}. That "
            "would end a loop over the collector as if it were complete: raise another exception"
        ) from error
