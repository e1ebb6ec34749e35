"""Where in the user's code a warning points to."""

from __future__ import annotations

import inspect


def users_stack_level() -> int:
    """The ``stacklevel`` with which the calling function warns about the user's own line."""
    level, frame = 0, inspect.currentframe()
    # By module: the code of a dataclass's __init__ has no file.
    while frame is not None and frame.f_globals.get("__name__", "").startswith("distcollect."):
        level, frame = level + 1, frame.f_back
    return level
