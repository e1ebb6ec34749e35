"""Publishes weights for a collector: selects them, checks them, selects workers, and pushes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard

import torch
from tensordict import TensorDictBase
from torch import nn

from distcollect.common import checks
from distcollect.common import tensor_cache as recycler
from distcollect.config import WeightSync
from distcollect.errors import ArgumentError, ArgumentTypeError
from distcollect.policy.weight_layout import WeightLayout, check_range, is_part, state_tensors
from distcollect.pool.pool import Pool
from distcollect.weights.push_handle import PushHandle
from distcollect.weights.updaters import WeightUpdaterBase, gpu_of

Weights: TypeAlias = "nn.Module | TensorDictBase | Mapping[str, Any]"
WorkerIds: TypeAlias = (
    "int | slice | torch.device | Sequence[int] | Sequence[torch.device] | str | None"
)


def is_by_worker(weights: object) -> TypeGuard[dict[int, Any]]:
    """Return True if ``weights`` is a dict of several workers' weights, by worker_id."""
    return (
        isinstance(weights, dict)
        and bool(weights)
        and all(type(checks.plain(key)) is int for key in weights)
    )


class Publisher:
    """Publishes the weights of a collector's policy and models."""

    def __init__(
        self,
        pool: Pool,
        layout: WeightLayout,
        own: Callable[[], nn.Module | None],
        *,
        updater: WeightUpdaterBase,
        options: WeightSync,
        max_interval: int | None,
        gpus: Mapping[int, str],
        evaluating: Collection[int] = (),
        complete: Callable[[Any], Weights] = lambda weights: weights,
        freeze: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Publish through ``pool``.

        Args:
            pool: sends the weights.
            layout: of the weights.
            own: gives the module that is published if the user gives no weights.
            updater: how weights get to the workers.
            options: what is sent.
            max_interval: a worker that is more versions behind is lagging; None: none is.
            gpus: worker_id to the name of the GPU that has its policy, "" for the CPU.
            evaluating: ids of the workers that evaluate the policy instead of collecting.
            complete: adds what is published besides the weights that a user gives, or None.
            freeze: called with each new version, before what is published is copied.
        """
        self._pool = pool
        self._layout = layout
        self._own = own
        self._updater = updater
        self._options = options
        self._max_interval = max_interval
        self._gpus = gpus
        self._evaluating = evaluating
        self._complete = complete
        self._freeze = freeze
        self._lock = threading.Lock()  # while a version is frozen, and not yet counted
        self._last: tuple[int, torch.Tensor] | None = None  # version, and what was published

    def publish(
        self, source: Weights | None, worker_ids: WorkerIds, last: Sequence[int] = ()
    ) -> list[PushHandle | None]:
        """See :meth:`~distcollect.RPCDataCollector.update_policy_weights_`; returns each push.

        ``last``: ids of the workers whose frames are in the last batch.
        """
        if not is_by_worker(source):
            return [self._publish(*self._addressed(source, worker_ids, last))]
        if worker_ids is not None:
            raise ArgumentError(
                f"worker_ids={worker_ids!r}: the weights are given by worker_id, which says to "
                "whom they go: leave worker_ids out"
            )
        addressed = [self._addressed(own, worker_id, last) for worker_id, own in source.items()]
        for each in addressed:
            self._publish(*each, only_checks=True)  # if one is wrong, nothing is sent
        return [self._publish(*each) for each in addressed]

    def _addressed(
        self, source: Weights | None, worker_ids: WorkerIds, last: Sequence[int]
    ) -> tuple[Weights | None, nn.Module | None, Sequence[int], bool]:
        """The arguments for :meth:`_publish`."""
        named = worker_ids is not None and not isinstance(worker_ids, str)
        if worker_ids is None:
            worker_ids = self._updater.all_worker_ids()
        selected = self.selected(worker_ids, last)
        if not isinstance(worker_ids, str):
            self._check_servers(selected)
        own = self._own()
        return source, own, selected, named and source is not None and not is_part(source, own)

    def _check_servers(self, selected: Collection[int]) -> None:
        """Raise ArgumentError if a server would get weights for some of its workers only."""
        served_by = self._pool.served_by
        for server in {*served_by.values()}:
            its_workers = {w for w in self._pool.worker_ids if served_by.get(w) == server}
            if its_workers.intersection(selected) and not its_workers.issubset(selected):
                raise ArgumentError(
                    f"worker_ids={sorted(selected)}: workers {sorted(its_workers)} have one policy,"
                    " in one inference server: name all of them, or none"
                )

    def _publish(
        self,
        source: Weights | None,
        own: nn.Module | None,
        worker_ids: Sequence[int],
        apart: bool,
        *,
        only_checks: bool = False,
    ) -> PushHandle | None:
        """Publish to these workers, of whom some may have left meanwhile."""
        holders = self._pool.holders(worker_ids)
        selected = [w for w in holders if not self._updater._skip_update(w)]  # noqa: SLF001 - the name that TorchRL has
        sends = bool(self._layout.entries and selected)
        if source is None and not sends:
            return None
        weights = self._layout.select(self._source(source, own))
        if not sends:
            return None
        if (narrow := self._options.narrow_dtype) is not None:
            check_range(weights, narrow)
        # Packed on their own device, so that a GPU's weights cross the bus in one piece.
        device = next(iter(weights.values())).device
        self._updater.check(device, selected)
        if only_checks:
            return None
        with self._lock:
            self._freeze(self._pool.version + 1)
            flat = self._snapshot(weights, device)
            handle = self._pool.push(flat, selected, apart=apart)
            self._last = handle.version, flat
        self._updater._call_post_hooks()  # noqa: SLF001 - the name that TorchRL has
        return handle

    def weights_of(self, version: int) -> dict[str, torch.Tensor] | None:
        """The weights of the newest version, by name; None if ``version`` is another one."""
        if self._last is None or self._last[0] != version:
            return None
        names = [entry.names[0] for entry in self._layout.entries]
        return dict(zip(names, self._layout.views(self._last[1]), strict=True))

    def _source(self, given: Weights | None, own: Any) -> Weights:
        """What is published: what the user gave, else what a server has, else the own module.

        What a server has is loaded into the own module first.
        """
        updater = self._updater
        served = updater._get_server_weights() if given is None else None  # noqa: SLF001 - the name that TorchRL has
        if is_part(given, own):
            given = own
        source = next((each for each in (given, served, own) if each is not None), None)
        if source is None:
            raise ArgumentTypeError(
                "this collector has no policy of its own (it was given policy_factory): pass the "
                "weights to send"
            )
        mapped: Any = self._complete(updater._maybe_map_weights(source))  # noqa: SLF001 - the name that TorchRL has
        if mapped is own:
            return state_tensors(own)  # its module was searched for
        if served is None or own is None:
            return mapped
        own = self._complete(own)
        self._layout.load(mapped, own)
        return own

    def publish_own(self, last: Sequence[int], *, sync: bool) -> None:
        """Publish between two batches, as ``update_at_each_batch`` says."""
        if sync:
            [handle] = self.publish(None, None, last)
            if handle is not None:
                handle.wait()
            return
        # Evaluation workers deliver no batch: otherwise they would never get a version.
        selected = set(self._still_there([*last, *self._evaluating]))
        if self._max_interval is not None:
            selected.update(self._lagging(self._max_interval))
        self._publish(None, self._own(), sorted(selected), apart=False)

    def _still_there(self, worker_ids: Collection[int]) -> list[int]:
        """Those of these workers that have not left, or been lost for good; each once."""
        there = {*self._pool.worker_ids}
        return [w for w in dict.fromkeys(worker_ids) if w in there]

    def _snapshot(self, weights: Mapping[str, torch.Tensor], device: torch.device) -> torch.Tensor:
        flat = (
            self._layout.empty(device)
            if device.type != "cpu"
            else recycler.empty((self._layout.num_bytes,), torch.uint8)
        )
        self._layout.pack(weights, flat)
        if flat.is_cuda:
            # Another thread reads it, with another stream.
            torch.cuda.current_stream(device).synchronize()
        return flat

    def selected(self, worker_ids: WorkerIds, last: Sequence[int] = ()) -> Sequence[int]:
        """The workers that the user's ``worker_ids`` selects.

        Raises:
            ArgumentError, ArgumentTypeError: it selects none, or is of a wrong type.
        """
        everyone = self._pool.worker_ids
        if not isinstance(worker_ids, str):
            by_device = checks.devices_among(worker_ids)
            if by_device:
                return self._with_policy_on(by_device)
            return checks.worker_ids(worker_ids, everyone) or everyone
        if worker_ids == "all":
            return everyone
        if worker_ids == "last_batch":
            if not last:
                raise ArgumentError(
                    "worker_ids='last_batch': no batch was taken yet; take one first"
                )
            # With a lost worker's share, a worker has several rollouts in one batch.
            return self._still_there(last)
        if worker_ids == "lagging":
            if self._max_interval is None:
                raise ArgumentError(
                    "worker_ids='lagging' needs max_weight_update_interval, a whole number of "
                    "versions, at the collector's construction"
                )
            return self._lagging(self._max_interval)
        raise ArgumentTypeError(
            f"worker_ids={worker_ids!r}: must be an int or a list of ints, or 'all', 'last_batch' "
            "or 'lagging'"
        )

    def _with_policy_on(self, devices: Sequence[torch.device]) -> list[int]:
        try:
            wanted = {gpu_of(device) for device in devices}
        except (AssertionError, RuntimeError) as error:
            raise ArgumentError(
                f"worker_ids={[*devices]}: this process has no such device ({error}). Name the "
                "workers by their ids instead"
            ) from error
        selected = [w for w in self._pool.worker_ids if self._gpus.get(w, "") in wanted]
        if not selected:
            raise ArgumentError(
                f"worker_ids={[*devices]}: no worker has its policy there; policy_device= puts it "
                "somewhere, and worker_ids may name workers instead"
            )
        return selected

    def _lagging(self, more_than: int) -> list[int]:
        # All versions count, not only those sent to a worker: one that gets few falls behind.
        oldest = self._pool.version + 1 - more_than
        return sorted(w for w, version in self._pool.acknowledged.items() if version < oldest)
