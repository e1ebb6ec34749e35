"""Attributes and methods of workers by TorchRL's names."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from distcollect.envs.base import called
from distcollect.errors import ArgumentError

if TYPE_CHECKING:
    from distcollect.collectors.rpc import RPCDataCollector

_KNOWN = "'worker_idx', 'frames_per_batch', 'env.NAME' and 'replay_buffer.NAME'"


def map_fn(
    collector: RPCDataCollector,
    workers: Sequence[int],
    path: str,
    list_of_args: Sequence[tuple[Any, ...]] | None,
    list_of_kwargs: Sequence[Mapping[str, Any]] | None,
) -> list[Any]:
    """Read an attribute of each worker, or call a method; see :meth:`.RPCDataCollector.map_fn`."""
    arguments = {"list_of_args": list_of_args, "list_of_kwargs": list_of_kwargs}
    for name, given in arguments.items():
        if given is not None and len(given) != len(workers):
            raise ArgumentError(
                f"Expected {len(workers)} argument entries in {name}, one for each worker, not "
                f"{len(given)}"
            )
    args = [()] * len(workers) if list_of_args is None else list_of_args
    kwargs = [{}] * len(workers) if list_of_kwargs is None else list_of_kwargs
    return [
        _apply(collector, worker_id, path, each, named)
        for worker_id, each, named in zip(workers, args, kwargs, strict=True)
    ]


def _apply(
    collector: RPCDataCollector,
    worker_id: int,
    path: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    if path == "get_distant_attr":
        [path] = [*args, *kwargs.values()]
        return _apply(collector, worker_id, path, (), {})
    if path == "worker_idx":
        return worker_id
    if path == "frames_per_batch":
        return collector.frames_per_batch // collector._options.rollouts_per_batch  # noqa: SLF001
    part, _, name = path.partition(".")
    if part == "env" and name:
        results = collector.call(name, *args, worker_ids=worker_id, **kwargs)[worker_id]
        return results[0] if len(results) == 1 else results
    if part == "replay_buffer" and name and collector.replay_buffer is not None:
        return called(operator.attrgetter(name)(collector.replay_buffer), args, kwargs)
    raise ArgumentError(
        f"{path!r}: workers step envs, and are no collectors; what can be read of them is {_KNOWN}"
    )
