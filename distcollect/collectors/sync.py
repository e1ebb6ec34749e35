"""The collector that steps envs in the calling process."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

from tensordict import TensorDict

from distcollect.collectors.background import Background
from distcollect.collectors.base import JOIN_TIMEOUT_S, DataCollectorBase
from distcollect.collectors.finalizer import Finalizer, close_later
from distcollect.collectors.in_process import InProcess
from distcollect.collectors.options import SyncOptions
from distcollect.collectors.signature import takes
from distcollect.errors import ArgumentTypeError, CollectorStateError
from distcollect.integrations import load
from distcollect.pool.publisher import Weights, WorkerIds
from distcollect.telemetry.recorder import StatsRecorder

# For the envs to close at exit.
_CLOSING_LIMIT_S = 60.0


class SyncDataCollector(DataCollectorBase):
    """Steps envs in the calling process; a batch is collected when it is requested.

    The policy is shared, not copied: training it in place shows in the next batch. In the
    background, after ``start()``, it is copied. Batches are ``[T]`` for one env, ``[n, T]`` for n.

    In the background, a thread of this process steps the envs, and settings of the whole process
    apply to both: TorchRL's losses, for example, set the exploration type of all TensorDict modules
    while they compute. In that case use :class:`aSyncDataCollector`.

    Envs that it made are closed by :meth:`shutdown`, at exit, and when nobody refers to the
    collector any more; envs of yours that you passed only by :meth:`shutdown`.
    """

    _options: SyncOptions
    _backend: InProcess

    @takes(SyncOptions)
    def __init__(self, options: SyncOptions) -> None:
        """Make the envs, and try envs and policy.

        Raises:
            ArgumentError, ArgumentTypeError: an argument is wrong.
            EnvError, PolicyError: an env or the policy failed when tried.
        """
        self._open(options)

    def _made_backend(self, stats_recorder: StatsRecorder, *, traces: bool) -> InProcess:
        backend = InProcess(self._options, stats_recorder, traces=traces)
        if backend.unclosed:
            Finalizer(self, partial(_shut_down, weakref.ref(self)), _CLOSING_LIMIT_S)
        return backend

    def __del__(self) -> None:
        # Not by what waits for the exit: that must not refer to the envs, as a policy or a maker
        # may refer to the collector.
        backend = vars(self).get("_backend")
        if backend is not None and backend.unclosed and self._owner.is_here:
            close_later(partial(_close, backend.unclosed))

    @property
    def env(self) -> Any:
        """The env that it steps, or a list of several."""
        envs = self._backend.engine.envs.members
        return envs[0] if len(envs) == 1 else envs

    def getattr_env(self, attr: str) -> Any:
        """An attribute of the env, or of the first one of several."""
        return getattr(self._backend.engine.envs.members[0], attr)

    def get_distant_attr(self, attr: str) -> Any:
        """An attribute of this collector, or with dots of its parts, such as "env.specs"."""
        return operator.attrgetter(attr)(self)

    def _map_one(self, worker_id: int, path: str, *args: Any, **kwargs: Any) -> Any:
        return self.get_distant_attr(path)(*args, **kwargs)

    def fake_tensordict(self) -> TensorDict:
        """A batch of zeros, with the entries and the shape of the batches that it will deliver.

        Raises:
            CollectorStateError: with ``trajs_per_batch``, or with an env whose entries change their
                shapes: there a batch has no fixed shape.
        """
        self._check_open()
        layout = self._backend.layout
        is_loose = layout.is_loose
        if is_loose or self._options.trajs_per_batch is not None:
            raise CollectorStateError(
                "fake_tensordict(): batches of this collector have no fixed shape: take a batch"
            )
        return self._backend.zeros()

    def reset(self) -> None:
        """Start the next batch with a reset of all envs.

        With ``trajs_per_batch``, the trajectories that were not delivered are dropped.
        """
        self._check_open()
        self._flow.drop_trajectories()
        self._backend.engine.reset()

    def update_policy_weights_(
        self,
        policy_or_weights: Weights | None = None,
        *,
        worker_ids: WorkerIds = None,
        wait: bool = True,
        **names: Any,
    ) -> None:
        """Publish new weights: a new ``policy_version`` from the next frame on.

        Args:
            policy_or_weights: module, TensorDict of parameters or state dict to copy into the
                policy; None, or the policy itself: it has these weights already.
            worker_ids: must be None, as there are no workers.
            wait: has no effect: the weights are in use at once.
            names: TorchRL's other names, as for collectors with workers.

        Raises:
            TypeError: ``worker_ids`` is given.
            WeightsError: a key is missing or unknown, or has another shape or dtype.
        """
        self._check_open()
        if worker_ids is not None:
            raise ArgumentTypeError(
                "worker_ids is given, but this collector has no weight updater and no workers: it "
                "steps its envs itself; leave worker_ids out"
            )
        plan = self._backend.plan
        weights = load("names of weights")(policy_or_weights, names, plan.policy, plan.models)
        with self._publishing():
            self._backend.publish(weights)

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed all envs, the policy's randomness, and torch's, numpy's and Python's generators.

        The next batch starts with a reset. See :meth:`DataCollectorBase.set_seed`.

        Args:
            seed: a whole number, 0 or more.
            static_seed: all envs get the same seed, instead of one each.

        Returns:
            A seed that none of the envs uses, for another collector.

        Raises:
            CollectorStateError: it was shut down, or collects in the background.
        """
        self._check_open()
        if self._background is not None:
            raise CollectorStateError("set_seed() must come before start()")
        return super().set_seed(seed, static_seed)

    def _use(self, background: Background) -> None:
        self._flow.drop("given_up")
        self._backend.use(background)

    def _release(self, *, close_envs: bool) -> None:
        self._backend.engine.stop()
        self._flow.close()
        if self._background is not None:
            has_ended = self._background.join(JOIN_TIMEOUT_S)
        else:
            has_ended = self._flow.has_ended(JOIN_TIMEOUT_S)
        self._backend.close(has_ended=has_ended, close_envs=close_envs)


def _close(parts: Sequence[Any]) -> None:
    for part in parts:
        part.close()


def _shut_down(reference: weakref.ref[SyncDataCollector]) -> None:
    collector = reference()
    if collector is not None:
        collector.shutdown()
