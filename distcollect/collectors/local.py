"""The collectors whose workers are processes on this host, with TorchRL's names and shapes."""

from __future__ import annotations

from distcollect.collectors.rpc import RPCDataCollector
from distcollect.collectors.signature import takes
from distcollect.collectors.worker_options import AsyncOptions, MultiAsyncOptions, MultiSyncOptions


class MultiSyncDataCollector(RPCDataCollector):
    """Steps envs in local worker processes; a batch is one rollout from each, collected on request.

    Its shape, with W workers of n envs and T steps each:

    | `cat_results` | "stack"     | 0            | -1           |
    |---------------|-------------|--------------|--------------|
    | one env       | `[W, T]`    | `[W * T]`    | `[W * T]`    |
    | n envs        | `[W, n, T]` | `[W * n, T]` | `[n, W * T]` |
    """

    @takes(MultiSyncOptions)
    def __init__(self, options: MultiSyncOptions) -> None:
        """Start the workers, and have each try its envs and the policy.

        Raises:
            DistCollectError: the errors of :class:`RPCDataCollector`.
        """
        self._open(options)


class MultiaSyncDataCollector(RPCDataCollector):
    """Steps envs in local worker processes, which keep collecting while the trainer works.

    A batch is a rollout from whichever worker is done first: ``[T]`` with one env per worker,
    ``[n, T]`` with n.
    """

    @takes(MultiAsyncOptions)
    def __init__(self, options: MultiAsyncOptions) -> None:
        """Start the workers, and have each try its envs and the policy.

        Raises:
            DistCollectError: the errors of :class:`RPCDataCollector`.
        """
        self._open(options)


class aSyncDataCollector(RPCDataCollector):  # noqa: N801 - TorchRL's name for it
    """Steps envs in one local worker process, which keeps collecting while the trainer works.

    A batch is ``[T]`` for one env, ``[n, T]`` for n.
    """

    @takes(AsyncOptions)
    def __init__(self, options: AsyncOptions) -> None:
        """Start the worker, and have it try its envs and the policy.

        Raises:
            DistCollectError: the errors of :class:`RPCDataCollector`.
        """
        self._open(options)


# TorchRL's newer names.
AsyncCollector = aSyncDataCollector
MultiSyncCollector = MultiSyncDataCollector
MultiAsyncCollector = MultiaSyncDataCollector
