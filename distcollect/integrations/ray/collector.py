"""The collector whose workers Ray starts."""

from __future__ import annotations

from distcollect.collectors.base import DataCollectorBase
from distcollect.collectors.rpc import RPCDataCollector
from distcollect.collectors.signature import takes
from distcollect.collectors.worker_options import RayOptions


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
        DataCollectorBase.__init__(self, options)


# TorchRL's name.
RayCollector = RayDataCollector
