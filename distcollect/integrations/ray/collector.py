"""The collector whose workers Ray starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any

from distcollect.collectors.classes import RPCDataCollector
from distcollect.collectors.options import RPCOptions
from distcollect.collectors.signature import takes
from distcollect.errors import ArgumentError
from distcollect.integrations.ray.settings import RaySettings


@dataclass(frozen=True, eq=False)
class RayOptions(RPCOptions):
    """Arguments of :class:`~distcollect.RayDataCollector`.

    Attributes:
        num_workers: number of workers, each in an actor of its own; None: one for each maker in a
            list. TorchRL's name is ``num_collectors``.
        listen: "HOST:PORT" of this host, where the workers join; None: the value of
            DISTCOLLECT_LISTEN, else this node's address in the Ray cluster, and any free port.
        ray_init_config: arguments of ``ray.init``, if this process is not connected to Ray yet;
            None: the cluster that RAY_ADDRESS names, else one that runs on this host, else a new
            one on this host.
        remote_configs: options of ``ray.remote`` for the actors: ``num_cpus``, ``num_gpus``,
            ``memory``, ``resources``, ``runtime_env``, ``scheduling_strategy`` and so on; a list
            has a dict for each worker. Without ``num_cpus`` it is 1; without ``max_restarts`` it is
            -1: Ray restarts an actor as often as needed.
        placement_group_strategy: "PACK", "SPREAD", "STRICT_PACK" or "STRICT_SPREAD": reserve the
            resources of all workers at one time, in a placement group of this strategy. Then no
            worker starts before there are resources for all. None: each starts as soon as there are
            resources for it.
    """

    _: KW_ONLY
    ray_init_config: Mapping[str, Any] | None = None
    remote_configs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None
    placement_group_strategy: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.placer.check_count(self.num_to_start)

    @cached_property
    def placer(self) -> RaySettings:
        return RaySettings(
            {} if self.ray_init_config is None else self.ray_init_config,
            {} if self.remote_configs is None else self.remote_configs,
            self.placement_group_strategy,
        )

    def _most_workers(self) -> int:
        raise ArgumentError(
            "num_workers is missing: say how many workers Ray is to start (TorchRL's "
            "num_collectors), or pass a list of env makers, one for each"
        )


class RayDataCollector(RPCDataCollector):
    """The same as :class:`RPCDataCollector`, with workers that a Ray cluster starts.

    Each worker is started by an actor of Ray, with the resources that ``remote_configs`` asks for.
    It joins this process over TCP as any other worker does: frames and weights don't pass Ray's
    object store. Workers for which there are no free resources join later, also those on nodes that
    Ray's autoscaler adds. When an actor or its node is lost, Ray starts the actor again, and the
    worker joins again. :meth:`shutdown` kills the actors.

    It also accepts the arguments of TorchRL's ``RayCollector`` under their names. Needs
    ``pip install 'distcollect[ray]'``, here and on all nodes of the cluster.
    """

    @takes(RayOptions)
    def __init__(self, options: RayOptions) -> None:
        """Have Ray start the workers, and have each try its envs and the policy.

        Raises:
            LaunchError: Ray is not installed, can't be reached, or can't start the workers.
            DistCollectError: the errors of :class:`RPCDataCollector`.
        """
        self._open(options)


# TorchRL's name.
RayCollector = RayDataCollector
