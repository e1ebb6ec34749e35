"""Rollouts for reinforcement learning, collected by workers over ``torch.distributed.rpc``.

::

    import distcollect as dc

    with dc.RPCDataCollector("CartPole-v1", policy, frames_per_batch=4096) as collector:
        for batch in collector:
            ...
            collector.update_policy_weights_(policy)
"""

import importlib as _importlib
from typing import TYPE_CHECKING, Any

from distcollect.common.lazy_compiler import import_compiler_late as _import_compiler_late
from distcollect.version import __version__

_import_compiler_late()

if TYPE_CHECKING:
    from distcollect.collectors.base import BaseCollector, DataCollectorBase
    from distcollect.collectors.checkpoint import Checkpoint
    from distcollect.collectors.distributed import (
        DistributedSyncCollector,
        DistributedSyncDataCollector,
    )
    from distcollect.collectors.generic import Collector, MultiCollector
    from distcollect.collectors.local import (
        AsyncCollector,
        MultiAsyncCollector,
        MultiaSyncDataCollector,
        MultiSyncCollector,
        MultiSyncDataCollector,
        aSyncDataCollector,
    )
    from distcollect.collectors.replay import RateLimited, ReplayBuffer
    from distcollect.collectors.rpc import (
        DistributedCollector,
        DistributedDataCollector,
        RPCCollector,
        RPCDataCollector,
    )
    from distcollect.collectors.sync import SyncDataCollector
    from distcollect.config import EvaluationWorkers, Faults, Monitor, Staleness, WeightSync
    from distcollect.envs.make import EnvContext
    from distcollect.errors import (
        ArgumentError,
        ArgumentTypeError,
        BatchTimeout,
        CollectorStateError,
        DeadlineError,
        DistCollectError,
        EnvError,
        LaunchError,
        PolicyError,
        PolicyKeyError,
        PolicyNotSendable,
        PolicySignatureError,
        RolloutGone,
        SpaceError,
        WeightsError,
        WeightsTimeout,
        WorkerError,
        WorkerLost,
        WorkerMismatch,
    )
    from distcollect.integrations.pettingzoo import PettingZooEnv
    from distcollect.integrations.ray.collector import RayCollector, RayDataCollector
    from distcollect.integrations.slurm.delayed import submitit_delayed_launcher
    from distcollect.launch.run import num_workers, run
    from distcollect.policy.base import Exploration
    from distcollect.pool.handover import RolloutReference
    from distcollect.results import (
        EnvFault,
        EpisodeStats,
        Evaluation,
        Frames,
        Lags,
        LagStats,
        LedgerReport,
        Stats,
        TrainerTimes,
        WorkerState,
        WorkerStats,
        WorkerThroughput,
        WorkerTimes,
    )
    from distcollect.telemetry.bottleneck import Bottleneck
    from distcollect.transport.worker_service import WeightSource
    from distcollect.weights.broadcast import AutoUpdater, BroadcastUpdater
    from distcollect.weights.push_handle import PushHandle
    from distcollect.weights.updaters import (
        RPCUpdater,
        SharedMemoryUpdater,
        WeightUpdaterBase,
    )

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "AsyncCollector",
    "AutoUpdater",
    "BaseCollector",
    "BatchTimeout",
    "Bottleneck",
    "BroadcastUpdater",
    "Checkpoint",
    "Collector",
    "CollectorStateError",
    "DataCollectorBase",
    "DeadlineError",
    "DistCollectError",
    "DistributedCollector",
    "DistributedDataCollector",
    "DistributedSyncCollector",
    "DistributedSyncDataCollector",
    "EnvContext",
    "EnvError",
    "EnvFault",
    "EpisodeStats",
    "Evaluation",
    "EvaluationWorkers",
    "Exploration",
    "Faults",
    "Frames",
    "LagStats",
    "Lags",
    "LaunchError",
    "LedgerReport",
    "Monitor",
    "MultiAsyncCollector",
    "MultiCollector",
    "MultiSyncCollector",
    "MultiSyncDataCollector",
    "MultiaSyncDataCollector",
    "PettingZooEnv",
    "PolicyError",
    "PolicyKeyError",
    "PolicyNotSendable",
    "PolicySignatureError",
    "PushHandle",
    "RPCCollector",
    "RPCDataCollector",
    "RPCUpdater",
    "RateLimited",
    "RayCollector",
    "RayDataCollector",
    "ReplayBuffer",
    "RolloutGone",
    "RolloutReference",
    "SharedMemoryUpdater",
    "SpaceError",
    "Staleness",
    "Stats",
    "SyncDataCollector",
    "TrainerTimes",
    "WeightSource",
    "WeightSync",
    "WeightUpdaterBase",
    "WeightsError",
    "WeightsTimeout",
    "WorkerError",
    "WorkerLost",
    "WorkerMismatch",
    "WorkerState",
    "WorkerStats",
    "WorkerThroughput",
    "WorkerTimes",
    "__version__",
    "aSyncDataCollector",
    "num_workers",
    "run",
    "submitit_delayed_launcher",
]


# Where each public name is defined. It is imported at its first use: a worker process, which
# imports single modules of this package, does not load the collectors.
_MODULES = {
    "ArgumentError": "distcollect.errors",
    "ArgumentTypeError": "distcollect.errors",
    "AsyncCollector": "distcollect.collectors.local",
    "AutoUpdater": "distcollect.weights.broadcast",
    "BaseCollector": "distcollect.collectors.base",
    "BatchTimeout": "distcollect.errors",
    "Bottleneck": "distcollect.telemetry.bottleneck",
    "BroadcastUpdater": "distcollect.weights.broadcast",
    "Checkpoint": "distcollect.collectors.checkpoint",
    "Collector": "distcollect.collectors.generic",
    "CollectorStateError": "distcollect.errors",
    "DataCollectorBase": "distcollect.collectors.base",
    "DeadlineError": "distcollect.errors",
    "DistCollectError": "distcollect.errors",
    "DistributedCollector": "distcollect.collectors.rpc",
    "DistributedDataCollector": "distcollect.collectors.rpc",
    "DistributedSyncCollector": "distcollect.collectors.distributed",
    "DistributedSyncDataCollector": "distcollect.collectors.distributed",
    "EnvContext": "distcollect.envs.make",
    "EnvError": "distcollect.errors",
    "EnvFault": "distcollect.results",
    "EpisodeStats": "distcollect.results",
    "Evaluation": "distcollect.results",
    "EvaluationWorkers": "distcollect.config",
    "Exploration": "distcollect.policy.base",
    "Faults": "distcollect.config",
    "Frames": "distcollect.results",
    "LagStats": "distcollect.results",
    "Lags": "distcollect.results",
    "LaunchError": "distcollect.errors",
    "LedgerReport": "distcollect.results",
    "Monitor": "distcollect.config",
    "MultiAsyncCollector": "distcollect.collectors.local",
    "MultiCollector": "distcollect.collectors.generic",
    "MultiSyncCollector": "distcollect.collectors.local",
    "MultiSyncDataCollector": "distcollect.collectors.local",
    "MultiaSyncDataCollector": "distcollect.collectors.local",
    "PettingZooEnv": "distcollect.integrations.pettingzoo",
    "PolicyError": "distcollect.errors",
    "PolicyKeyError": "distcollect.errors",
    "PolicyNotSendable": "distcollect.errors",
    "PolicySignatureError": "distcollect.errors",
    "PushHandle": "distcollect.weights.push_handle",
    "RPCCollector": "distcollect.collectors.rpc",
    "RPCDataCollector": "distcollect.collectors.rpc",
    "RPCUpdater": "distcollect.weights.updaters",
    "RateLimited": "distcollect.collectors.replay",
    "RayCollector": "distcollect.integrations.ray.collector",
    "RayDataCollector": "distcollect.integrations.ray.collector",
    "ReplayBuffer": "distcollect.collectors.replay",
    "RolloutGone": "distcollect.errors",
    "RolloutReference": "distcollect.pool.handover",
    "SharedMemoryUpdater": "distcollect.weights.updaters",
    "SpaceError": "distcollect.errors",
    "Staleness": "distcollect.config",
    "Stats": "distcollect.results",
    "SyncDataCollector": "distcollect.collectors.sync",
    "TrainerTimes": "distcollect.results",
    "WeightSource": "distcollect.transport.worker_service",
    "WeightSync": "distcollect.config",
    "WeightUpdaterBase": "distcollect.weights.updaters",
    "WeightsError": "distcollect.errors",
    "WeightsTimeout": "distcollect.errors",
    "WorkerError": "distcollect.errors",
    "WorkerLost": "distcollect.errors",
    "WorkerMismatch": "distcollect.errors",
    "WorkerState": "distcollect.results",
    "WorkerStats": "distcollect.results",
    "WorkerThroughput": "distcollect.results",
    "WorkerTimes": "distcollect.results",
    "aSyncDataCollector": "distcollect.collectors.local",
    "num_workers": "distcollect.launch.run",
    "run": "distcollect.launch.run",
    "submitit_delayed_launcher": "distcollect.integrations.slurm.delayed",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'distcollect' has no attribute {name!r}")
    value = getattr(_importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__}.difference({"Any", "TYPE_CHECKING"}))
