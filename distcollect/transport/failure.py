"""Exceptions of a worker, as they travel to the trainer: as text."""

from __future__ import annotations

import contextlib
import traceback
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch.nn.modules import module

from distcollect.errors import (
    ArgumentError,
    ArgumentTypeError,
    DeadlineError,
    DistCollectError,
    EnvError,
    PolicyError,
    PolicyKeyError,
    PolicySignatureError,
    SpaceError,
    WorkerError,
    WorkerLost,
)
from distcollect.results import EnvFault

# The trainer raises them as what they are. Some arguments turn out to be wrong only when a worker
# makes the envs.
_WORKER_ERRORS = (EnvError, PolicyError, PolicyKeyError, PolicySignatureError, WorkerLost)
_PLAIN_ERRORS = (ArgumentError, ArgumentTypeError, DeadlineError, SpaceError)
_ERROR_OF: dict[str, type[DistCollectError]] = {
    kind.__name__: kind for kind in (*_WORKER_ERRORS, *_PLAIN_ERRORS)
}
_TRAVELLING = ("num_env_faults", "env_faults", "is_permanent")

_PACKAGE = str(Path(__file__).parents[1])
# Between two lines of this package there may be one of a context manager.
# And some of torch between the call of a module and its forward().
_LEFT_OUT = (_PACKAGE + "/", contextlib.__file__, module.__file__)


@dataclass(frozen=True)
class Failure:
    """An exception that travels from a worker to the trainer as text.

    Attributes:
        kind: name of its class.
        message: what it says.
        worker_id: the worker that raised it.
        remote_traceback: its traceback, see :func:`users_traceback`.
        num_env_faults: of an :class:`~distcollect.errors.EnvError`.
        env_faults: of the same.
        is_permanent: of a :class:`~distcollect.errors.WorkerError`.
    """

    kind: str
    message: str
    worker_id: int
    remote_traceback: str
    num_env_faults: int = 0
    env_faults: tuple[EnvFault, ...] = ()
    is_permanent: bool = False

    def passed_on(self) -> DistCollectError:
        """Return the exception for a process in between to raise, as if it had come up there."""
        kind = _ERROR_OF.get(self.kind, WorkerError)
        error = kind(self.message)
        if isinstance(error, WorkerError):
            error.remote_traceback = self.remote_traceback
        return error

    @classmethod
    def of(cls, error: BaseException, worker_id: int) -> Failure:
        """Describe ``error``."""
        kind = type(error).__name__
        message = str(error) if isinstance(error, DistCollectError) else f"{kind}: {error}"
        trace = getattr(error, "remote_traceback", "") or users_traceback(error)
        more = {name: getattr(error, name) for name in _TRAVELLING if hasattr(error, name)}
        return cls(kind, message, worker_id, trace, **more)

    def error(self) -> DistCollectError:
        """Return the exception to raise at the trainer."""
        kind = _ERROR_OF.get(self.kind, WorkerError)
        if not issubclass(kind, WorkerError):
            return kind(f"worker {self.worker_id}: {self.message}")
        error = kind(self.message, worker_id=self.worker_id, remote_traceback=self.remote_traceback)
        for name in filter(partial(hasattr, error), _TRAVELLING):
            setattr(error, name, getattr(self, name))
        return error


def users_traceback(error: BaseException) -> str:
    """Return the traceback of ``error`` and of its causes, without the lines of this package.

    An error of this package that has a cause says no more than the cause does, so the text begins
    with the cause. The text is "" if an error of this package has no line outside of it: its
    message says all. Any other error that was raised within this package alone is a mistake in it,
    and its traceback is complete.
    """
    cause = error
    while isinstance(cause, DistCollectError) and cause.__cause__ is not None:
        cause = cause.__cause__
    shown = traceback.TracebackException.from_exception(cause)
    is_users = not isinstance(cause, DistCollectError)
    part: traceback.TracebackException | None = shown
    while part is not None:
        before = part.__context__.stack if is_users and part.__context__ is not None else ()
        if any(line.filename.startswith(_PACKAGE) for line in before):
            part.__context__ = None  # it was handled here, by calling the user's code again
        users = [line for line in part.stack if not line.filename.startswith(_LEFT_OUT)]
        part.stack = traceback.StackSummary.from_list(users)
        part = part.__cause__ or (None if part.__suppress_context__ else part.__context__)
    if not shown.stack and isinstance(cause, DistCollectError):
        return ""
    if not shown.stack and cause is error:
        return "".join(traceback.format_exception(error))
    return "".join(shown.format())
