"""The collectors whose workers are processes on this host, with TorchRL's names and shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from distcollect.collectors.base import EnvMaker
from distcollect.collectors.rpc import RPCDataCollector
from distcollect.errors import ArgumentError


class MultiSyncDataCollector(RPCDataCollector):
    """Steps envs in local worker processes; a batch is one rollout from each, collected when asked.

    Its shape, with W workers of n envs and T steps each:

    ===============  ==========  ===================  =============
    ``cat_results``  "stack"     0                    -1
    ===============  ==========  ===================  =============
    one env          ``[W, T]``  ``[W * T]``          ``[W * T]``
    n envs           ``[W, n, T]``  ``[W * n, T]``    ``[n, W * T]``
    ===============  ==========  ===================  =============
    """

    _squeezes = True
    _is_local = True

    def __init__(
        self,
        create_env_fn: EnvMaker | Sequence[EnvMaker],
        policy: Callable[..., Any] | None = None,
        *,
        frames_per_batch: int,
        num_workers: int | None = None,
        cat_results: int | str | None = "stack",
        **options: Any,
    ) -> None:
        """Start the workers, and have each try out its envs and the policy.

        Args:
            create_env_fn: as for :class:`RPCDataCollector`; a list has one maker for each worker.
            policy: as there.
            frames_per_batch: frames in each batch; a multiple of all envs of all workers.
            num_workers: None: one for each maker in a list, or for each core of this host.
            cat_results: how the workers' rollouts are joined; None: "stack".
            options: all others of :class:`RPCDataCollector` but ``sync`` and ``listen``.

        Raises: as :class:`RPCDataCollector`.
        """
        _refuse(self, options)
        super().__init__(
            create_env_fn,
            policy,
            frames_per_batch=frames_per_batch,
            num_workers=num_workers,
            cat_results="stack" if cat_results is None else cat_results,
            sync=True,
            **options,
        )


class MultiaSyncDataCollector(RPCDataCollector):
    """Steps envs in local worker processes, which keep collecting while the trainer works.

    A batch is a rollout from whichever worker is done first: ``[T]`` with one env per worker,
    ``[n, T]`` with n.
    """

    _squeezes = True
    _is_local = True

    def __init__(
        self,
        create_env_fn: EnvMaker | Sequence[EnvMaker],
        policy: Callable[..., Any] | None = None,
        *,
        frames_per_batch: int,
        num_workers: int | None = None,
        **options: Any,
    ) -> None:
        """Start the workers, and have each try out its envs and the policy.

        Args:
            create_env_fn: as for :class:`RPCDataCollector`; a list has one maker for each worker.
            policy: as there.
            frames_per_batch: frames in each batch; a multiple of one worker's envs.
            num_workers: None: one for each maker in a list, or for each core of this host.
            options: all others of :class:`RPCDataCollector` but ``sync``, ``cat_results``,
                ``preemptive_threshold``, ``batch_deadline_s`` and ``listen``.

        Raises: as :class:`RPCDataCollector`.
        """
        _refuse(self, options)
        super().__init__(
            create_env_fn,
            policy,
            frames_per_batch=frames_per_batch,
            num_workers=num_workers,
            sync=False,
            **options,
        )


class aSyncDataCollector(MultiaSyncDataCollector):  # noqa: N801 - TorchRL's name for it
    """Steps envs in one local worker process, which keeps collecting while the trainer works.

    A batch is ``[T]`` for one env, ``[n, T]`` for n.
    """

    def __init__(
        self,
        create_env_fn: EnvMaker,
        policy: Callable[..., Any] | None = None,
        *,
        frames_per_batch: int,
        **options: Any,
    ) -> None:
        """Start the worker, and have it try out its envs and the policy.

        Args:
            create_env_fn: as for :class:`RPCDataCollector`, but no list.
            policy: as there.
            frames_per_batch: frames in each batch; a multiple of the envs.
            options: as for :class:`MultiaSyncDataCollector`, without ``num_workers``.

        Raises: as :class:`RPCDataCollector`.
        """
        _refuse(self, options, "num_workers")
        super().__init__(
            create_env_fn, policy, frames_per_batch=frames_per_batch, num_workers=1, **options
        )


def _refuse(collector: RPCDataCollector, options: dict[str, Any], *names: str) -> None:
    """Raise ArgumentError for what makes this collector what it is."""
    for name in ("sync", "listen", *names):
        if name in options:
            raise ArgumentError(
                f"{type(collector).__name__} has no {name}: use RPCDataCollector to choose"
            )
