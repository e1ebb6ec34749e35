"""Calls the user's ``main``, and ends what it leaves behind.

When a function returns, Python destroys its variables before the caller goes on. That can hang in
native code that holds the interpreter lock: the last owner of a Gloo process group, often the
reducer of a DistributedDataParallel, waits for the group's threads, and such a thread waits for the
lock, to release a tensor that it has gathered. So the variables of ``main`` are kept until
everything of ours has ended. Then they are destroyed with a deadline, and process groups are not
destroyed at all.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Generic, TypeVar

import torch.distributed
from torch import nn

from distcollect.common.forks import keep_for_ever
from distcollect.launch.exit_deadline import ExitDeadline, exit_code

T = TypeVar("T")

# Torch declares no types for its process groups.
dist: Any = torch.distributed


class MainCall(Generic[T]):
    """One call of ``main``."""

    def __init__(self, main: Callable[[], T]) -> None:
        self._main = main
        self._frames: list[FrameType] = []
        self._had_group = _has_group()

    def result(self) -> T:
        """Call ``main`` and return its result. Its variables are kept."""
        # A profiler of the user's is left alone; then the variables end with the call.
        if sys.getprofile() is None:
            sys.setprofile(self._keep_first_frame)
        try:
            return self._main()
        finally:
            if sys.getprofile() == self._keep_first_frame:
                sys.setprofile(None)

    def _keep_first_frame(self, frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            sys.setprofile(None)
            self._frames.append(frame)

    def end_what_it_left(self, exiting: SystemExit | None = None) -> None:
        """Destroy the variables of ``main``, and the process group that it made and left.

        If that hangs, the process is ended: see :mod:`.exit_deadline`.

        Args:
            exiting: what ``main`` raised; None: it has returned. All functions that this exception
                came through lose their variables.
        """
        code = exit_code(exiting)
        with contextlib.closing(ExitDeadline(code)) as deadline:
            for group in _process_groups():
                keep_for_ever(group)
            for name, variables in self._variables(exiting):
                for variable in list(variables):
                    kind = type(variables[variable]).__qualname__
                    what = f"the variable {variable!r} of {name}(), of type {kind},"
                    deadline.waits_for(f"main() is done, but {what}")
                    del variables[variable]
            deadline.waits_for("main() is done, but the process group that it left")
            # Those of other trainers may wait for this one if it has failed.
            if code == 0 and _has_group() and not self._had_group:
                dist.destroy_process_group()

    def _variables(self, exiting: SystemExit | None) -> Iterator[tuple[str, dict[str, Any]]]:
        """The functions that have ended, and their variables, to which nothing else refers now."""
        frames = [*self._frames]
        if exiting is not None:
            of_error = [frame for frame, _ in traceback.walk_tb(exiting.__traceback__)]
            frames += [frame for frame in of_error if frame not in frames]
        self._frames.clear()
        while frames:
            frame = frames.pop(0)
            variables = dict(frame.f_locals)
            try:
                frame.clear()
            except RuntimeError:  # it is still being executed
                continue
            # Before Python 3.13 a frame keeps the dictionary that it gave, until it is asked again.
            dict(frame.f_locals)
            name = frame.f_code.co_name
            del frame
            yield name, variables


def _has_group() -> bool:
    return bool(dist.is_available() and dist.is_initialized())


def _process_groups() -> list[Any]:
    """The default process group, and those of modules such as DistributedDataParallel."""
    if not dist.is_available():
        return []
    groups = [dist.group.WORLD] if dist.is_initialized() else []
    for module in gc.get_objects():
        # Not isinstance(): it runs code of proxy objects.
        if issubclass(type(module), nn.Module):
            group = vars(module).get("process_group")
            if isinstance(group, dist.ProcessGroup):
                groups.append(group)
    return groups
