"""TorchRL's names for a collector whose arguments say in which processes it steps envs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

from distcollect.collectors.options import SyncOptions
from distcollect.collectors.rpc import (
    MultiaSyncDataCollector,
    MultiSyncDataCollector,
    RPCDataCollector,
)
from distcollect.collectors.signature import takes
from distcollect.collectors.sync import SyncDataCollector
from distcollect.common.checks import plain, positive
from distcollect.errors import ArgumentError, ArgumentTypeError
from distcollect.integrations import load

_BACKENDS = {
    "direct": "direct",
    "process": "process",
    "multiprocessing": "process",
    "rpc": "rpc",
    "distributed": "rpc",
    "submitit": "rpc",
    "ray": "ray",
}


@dataclass(frozen=True, eq=False)
class GenericOptions(SyncOptions):
    """Arguments of :class:`~distcollect.Collector`, where it steps envs in this process.

    Attributes:
        backend: where envs are stepped: "direct" in this process, "process" in local worker
            processes, "rpc" or "distributed" in workers on any hosts, "ray" in workers that a Ray
            cluster starts; None: "process" if ``num_collectors`` is given, else "direct".
        backend_options: further arguments for the collector that the backend selects.
        num_collectors: number of workers; None: one for each maker in a list, else one.
        sync: with workers, True: a batch is one rollout from each; False: from one of them.
        worker_idx: without workers, the ``worker_id`` that env makers with a parameter named
            ``context`` are given; None: 0.
    """

    _: KW_ONLY
    backend: str | None = None
    backend_options: Mapping[str, Any] | None = None
    num_collectors: int | None = None
    sync: bool | None = None
    worker_idx: int | None = None

    @property
    def worker_id(self) -> int:
        return self.worker_idx or 0


class Collector(SyncDataCollector):
    """TorchRL's name for all collectors: ``backend`` and ``num_collectors`` select one.

    By default it is a :class:`SyncDataCollector`, which steps envs in the calling process. With
    ``backend="process"`` or ``num_collectors`` the call returns a :class:`MultiSyncDataCollector`
    (``sync=True``) or a :class:`MultiaSyncDataCollector`; with ``backend="rpc"`` or "distributed" a
    :class:`RPCDataCollector`; with "ray" a :class:`RayDataCollector`. These take the arguments of
    that class.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make the collector that the arguments select.

        Raises:
            ArgumentError, ArgumentTypeError: the arguments contradict each other.
        """
        if cls is not Collector:
            return super().__new__(cls)
        backend = _backend(kwargs)
        if backend != "direct":
            return _with_workers(backend, args, kwargs)
        _check_direct(kwargs)
        return super().__new__(cls)

    _options: GenericOptions

    @property
    def worker_idx(self) -> int | None:
        """``worker_idx`` as it was given."""
        return self._options.worker_idx

    @takes(GenericOptions)
    def __init__(self, options: GenericOptions) -> None:
        """Make the envs, and try envs and policy.

        Raises:
            ArgumentError, ArgumentTypeError: an argument is wrong.
            EnvError, PolicyError: an env or the policy failed when tried.
        """
        self._open(options)


# What inspect.signature() and help() show of the class.
setattr(Collector.__new__, "__signature__", inspect.signature(Collector.__init__))  # noqa: B010


def _backend(kwargs: Mapping[str, Any]) -> str:
    given, count = kwargs.get("backend"), plain(kwargs.get("num_collectors"))
    positive("num_collectors", count, optional=True)
    if given is None:
        return "direct" if count is None else "process"
    if given not in _BACKENDS:
        raise ArgumentError(f"backend={given!r}: use one of {', '.join(map(repr, _BACKENDS))}")
    return _BACKENDS[given]


def _check_direct(kwargs: Mapping[str, Any]) -> None:
    if kwargs.get("num_collectors") not in (None, 1):
        raise ArgumentError(
            "backend='direct' has at most one collector, in this process: use backend='process'"
        )
    for name in ("sync", "backend_options"):
        if kwargs.get(name):
            raise ArgumentError(f"{name} is for collectors with workers, and backend is 'direct'")


def _with_workers(backend: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The collector with workers that the arguments select."""
    given = dict(kwargs)
    name, options = given.pop("backend", None), given.pop("backend_options", None) or {}
    if twice := options.keys() & {*given, *("create_env_fn", "policy")[: len(args)]}:
        raise ArgumentError(f"backend_options has duplicates of arguments: {sorted(twice)}")
    # TorchRL's backends have an argument `backend` too: "gloo" or "nccl".
    given.update(options)
    if name == "submitit" and given.setdefault("launcher", "submitit") != "submitit":
        raise ArgumentError("backend='submitit' requires launcher='submitit'")
    sync = given.pop("sync", None)
    if sync is not None and not isinstance(sync, bool):
        raise ArgumentTypeError(f"sync={sync!r}: must be True or False")
    makers = args[0] if args else given.get("create_env_fn")
    if not isinstance(makers, list | tuple):
        given.setdefault("num_collectors", 1)
    if backend in ("rpc", "ray"):
        anywhere = load("collector of ray") if backend == "ray" else RPCDataCollector
        return anywhere(*args, sync=bool(sync), **given)
    return MultiCollector(*args, sync=bool(sync), **given)


class MultiCollector:
    """TorchRL's name for :class:`MultiSyncDataCollector` and :class:`MultiaSyncDataCollector`."""

    def __new__(cls, *args: Any, sync: bool, **kwargs: Any) -> Any:
        """Make the collector that ``sync`` selects; it takes the same arguments."""
        return (MultiSyncDataCollector if sync else MultiaSyncDataCollector)(*args, **kwargs)
