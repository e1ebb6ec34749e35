"""The collector that steps envs in the calling process."""

from __future__ import annotations

import operator
from typing import Any

from tensordict import TensorDict

from distcollect.collectors.base import DataCollectorBase
from distcollect.collectors.in_process import InProcess
from distcollect.collectors.options import SyncOptions
from distcollect.collectors.signature import takes
from distcollect.errors import CollectorStateError


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

    _backend_class = InProcess
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
        self._backend.drop_trajectories()
        self._backend.engine.reset()
