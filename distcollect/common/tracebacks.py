"""Tracebacks as users want to read them: without the lines of this package."""

from __future__ import annotations

import contextlib
import traceback
from pathlib import Path

from distcollect.errors import DistCollectError

_PACKAGE = str(Path(__file__).parents[1])
# Between two lines of this package there may be one of a context manager.
_LEFT_OUT = (_PACKAGE + "/", contextlib.__file__)


def users_traceback(error: BaseException) -> str:
    """The traceback of ``error`` and of its causes, reduced to lines outside of this package.

    An error of this package that has a cause says no more than the cause does, so the text begins
    with the cause. The text is "" if an error of this package has no line outside of it: its
    message says all. Any other error that was raised within this package alone is a mistake in it,
    and its traceback is complete.
    """
    cause = error
    while isinstance(cause, DistCollectError) and cause.__cause__ is not None:
        cause = cause.__cause__
    shown = traceback.TracebackException.from_exception(cause)
    if not _reduce(shown):
        if isinstance(cause, DistCollectError):
            return ""
        if cause is error:
            return "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return "".join(shown.format())


def _reduce(shown: traceback.TracebackException) -> bool:
    """Remove lines of this package, also from the causes; whether lines of ``shown`` remain."""
    part: traceback.TracebackException | None = shown
    while part is not None:
        part.stack = traceback.StackSummary.from_list(
            [line for line in part.stack if not line.filename.startswith(_LEFT_OUT)]
        )
        part = part.__cause__ or (None if part.__suppress_context__ else part.__context__)
    return bool(shown.stack)
