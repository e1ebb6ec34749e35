"""Attributes and methods of workers, and of their collector, by TorchRL's names."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tensordict import TensorDict

from distcollect.collectors.base import DataCollectorBase
from distcollect.collectors.session import Session
from distcollect.collectors.worker_options import WorkerOptions
from distcollect.envs.base import called
from distcollect.errors import ArgumentError, CollectorStateError

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


class WorkerAccess(DataCollectorBase):
    """A collector with workers: what TorchRL's names for its parts give."""

    _options: WorkerOptions
    _session: Session

    @property
    def preemptive_threshold(self) -> float:
        """The share of a sync batch's rollouts that preempts the other workers; 1: none are."""
        share = self._options.preemptive_threshold
        return 1.0 if share is None else float(share)

    @property
    def interruptor(self) -> None:
        """None: nothing that workers share is needed to preempt them."""

    def getattr_env(self, attr: str) -> Any:
        """An attribute of the first worker's first env, or what that method of it returns."""
        first = min(self._session.pool.worker_ids)
        return self.call(attr, worker_ids=first)[first][0]

    def get_distant_attr(self, attr: str) -> list[Any]:
        """An attribute of each worker, by TorchRL's names.

        Args:
            attr: "worker_idx"; "frames_per_batch", of one worker; with dots an attribute of its
                envs, such as "env.specs", or of the collector's buffer: "replay_buffer.storage".

        Raises:
            ArgumentError: workers have nothing of this name.
        """
        return self.map_fn(attr)

    def map_fn(
        self,
        method_name: str,
        list_of_args: Sequence[tuple[Any, ...]] | None = None,
        list_of_kwargs: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Any]:
        """Call a method of each worker, by TorchRL's names; see also :meth:`call`.

        Args:
            method_name: as for :meth:`get_distant_attr`.
            list_of_args: positional arguments, one tuple for each worker.
            list_of_kwargs: keyword arguments, one dict for each worker.

        Returns:
            The result of each worker, in the order of worker_id; of several envs a list.

        Raises:
            ArgumentError: workers have nothing of this name, or a list has another length.
            EnvError: an env has no such method, or it raised.
        """
        self._check_open()
        workers = sorted(self._session.pool.worker_ids)
        args = one_for_each("list_of_args", list_of_args, (), len(workers))
        kwargs = one_for_each("list_of_kwargs", list_of_kwargs, {}, len(workers))
        num_frames = self.frames_per_batch // self._options.rollouts_per_batch
        return [
            WorkerAttributes(
                worker_id,
                num_frames,
                self.replay_buffer,
                partial(self._call_one, worker_id),
            ).apply(method_name, each, named)
            for worker_id, each, named in zip(workers, args, kwargs, strict=True)
        ]

    def _call_one(self, worker_id: int, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        return self.call(method, *args, worker_ids=worker_id, **kwargs)[worker_id]

    def fake_tensordict(self) -> TensorDict:
        """Not possible with workers.

        Raises:
            NotImplementedError: always; says what to use instead.
        """
        raise NotImplementedError(
            "fake_tensordict() is for collectors without workers: take a batch and fill it with "
            "zeros, as in collector.next().zero_()"
        )

    def reset(self) -> None:
        """Not possible while workers collect.

        Raises:
            CollectorStateError: always; says what to use instead.
        """
        raise CollectorStateError(
            "workers can't be told to reset: set_seed() starts all envs over, and "
            "reset_at_each_iter=True resets them before each rollout"
        )

    def state_dict(self) -> dict[str, Any]:
        """As of every collector.

        With TorchRL's envs there are also "worker0" and so on, as in the state of TorchRL's
        collectors. They have ``"policy_version"`` and ``"policy_state_dict"`` of this collector.
        """
        state = super().state_dict()
        if not self._layout.is_torchrl:
            return state
        shared = {
            name: state[name] for name in ("policy_version", "policy_state_dict") if name in state
        }
        workers = sorted(self._session.pool.worker_ids)
        return {**state, **{f"worker{worker_id}": dict(shared) for worker_id in workers}}
