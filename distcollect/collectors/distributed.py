"""TorchRL's name for a sync collector whose workers are on any hosts."""

from __future__ import annotations

from distcollect.collectors.rpc import RPCDataCollector
from distcollect.collectors.signature import takes
from distcollect.collectors.worker_options import DistributedSyncOptions


class DistributedSyncDataCollector(RPCDataCollector):
    """The same as :class:`RPCDataCollector` with ``sync=True``."""

    @takes(DistributedSyncOptions)
    def __init__(self, options: DistributedSyncOptions) -> None:
        """Start or find the workers, and have each try its envs and the policy.

        Raises:
            DistCollectError: the errors of :class:`RPCDataCollector`.
        """
        self._open(options)


# TorchRL's newer name.
DistributedSyncCollector = DistributedSyncDataCollector
