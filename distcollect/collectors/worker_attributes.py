"""What TorchRL's ``map_fn`` and ``get_distant_attr`` read of workers, by its names."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distcollect.envs.base import called
from distcollect.errors import ArgumentError

_KNOWN = "'worker_idx', 'frames_per_batch', 'env.NAME' and 'replay_buffer.NAME'"


@dataclass(frozen=True)
class WorkerAttributes:
    """Reads attributes of one worker, and calls its methods.

    Attributes:
        worker_id: the worker.
        frames_per_batch: number of frames in one of its rollouts.
        replay_buffer: the collector's buffer.
        call_envs: calls a method of its envs; a list with one result for each.
    """

    worker_id: int
    frames_per_batch: int
    replay_buffer: Any
    call_envs: Callable[..., list[Any]]

    def apply(self, path: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] = {}) -> Any:
        """Call a method, or read an attribute.

        Args:
            path: its name, with dots.
            args: arguments for the method.
            kwargs: its keyword arguments.

        Returns:
            The result; for a method of several envs a list with that of each.

        Raises:
            ArgumentError: workers have nothing of this name.
            EnvError: the env has no such method, or it raised.
        """
        if path == "get_distant_attr":
            return self.apply(*args, **kwargs)
        if path == "worker_idx":
            return self.worker_id
        if path == "frames_per_batch":
            return self.frames_per_batch
        part, _, name = path.partition(".")
        if part == "env" and name:
            results = self.call_envs(name, *args, **kwargs)
            return results[0] if len(results) == 1 else results
        if part == "replay_buffer" and name and self.replay_buffer is not None:
            return called(operator.attrgetter(name)(self.replay_buffer), args, kwargs)
        raise ArgumentError(
            f"{path!r}: workers step envs, and are no collectors; what can be read of them is "
            f"{_KNOWN}"
        )


def one_for_each(what: str, given: Sequence[Any] | None, default: Any, count: int) -> list[Any]:
    """``given``, which must have one entry for each worker; None: ``default`` for each.

    Raises:
        ArgumentError: it has another length.
    """
    if given is None:
        return [default] * count
    if len(given) != count:
        raise ArgumentError(
            f"Expected {count} argument entries in {what}, one for each worker, not {len(given)}"
        )
    return list(given)
