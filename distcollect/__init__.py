"""Rollouts for reinforcement learning, collected by workers over ``torch.distributed.rpc``.

::

    import distcollect as dc

    with dc.RPCDataCollector("CartPole-v1", policy, frames_per_batch=4096) as collector:
        for batch in collector:
            ...
            collector.update_policy_weights_(policy)
"""

import importlib as _importlib
from difflib import get_close_matches as _get_close_matches
from typing import Any as _Any

from distcollect.common.lazy_compiler import import_compiler_late as _import_compiler_late
from distcollect.version import __version__

_import_compiler_late()

# The public names, by the module of this package that defines them; the stub beside this file has
# them for type checkers. Each is imported at its first use: a worker process, which imports single
# modules of this package, does not load the collectors.
_NAMES = {
    "collectors.base": "BaseCollector DataCollectorBase",
    "collectors.checkpoint": "Checkpoint",
    "collectors.classes": (
        "AsyncCollector Collector DistributedCollector DistributedDataCollector "
        "DistributedSyncCollector DistributedSyncDataCollector MultiAsyncCollector MultiCollector "
        "MultiSyncCollector MultiSyncDataCollector MultiaSyncDataCollector RPCCollector "
        "RPCDataCollector SyncDataCollector aSyncDataCollector"
    ),
    "collectors.replay": "Prioritized RateLimited ReplayBuffer",
    "config": "EvaluationWorkers Faults Inference Monitor Normalize Staleness WeightSync",
    "envs.make": "EnvContext",
    "errors": (
        "ArgumentError ArgumentTypeError BatchTimeout CollectorStateError DeadlineError "
        "DistCollectError EnvError LaunchError PolicyError PolicyKeyError PolicyNotSendable "
        "PolicySignatureError RolloutGone SpaceError WeightsError WeightsTimeout WorkerError "
        "WorkerLost WorkerMismatch"
    ),
    "integrations.pettingzoo": "PettingZooEnv",
    "integrations.ray.collector": "RayCollector RayDataCollector",
    "integrations.slurm.delayed": "submitit_delayed_launcher",
    "launch.run": "num_workers run",
    "policy.base": "Exploration",
    "policy.noise": "EpsilonGreedy GaussianNoise LinearSchedule OrnsteinUhlenbeckNoise",
    "pool.handover": "RolloutReference",
    "results": (
        "EnvFault EpisodeStats Evaluation EvaluationStats Frames InferenceStats LagStats Lags "
        "LedgerReport Stats TrainerTimes WorkerState WorkerStats WorkerThroughput WorkerTimes"
    ),
    "telemetry.bottleneck": "Bottleneck",
    "transport.worker_service": "WeightSource",
    "weights.broadcast": "AutoUpdater BroadcastUpdater",
    "weights.push_handle": "PushHandle",
    "weights.updaters": "TransportUpdater SharedMemoryUpdater WeightUpdaterBase",
}
_MODULES = {name: f"distcollect.{module}" for module, n in _NAMES.items() for name in n.split()}

__all__ = [*sorted(_MODULES), "__version__"]  # noqa: PLE0604 - they are strings


def __getattr__(name: str) -> _Any:
    if name not in _MODULES:
        close = _get_close_matches(name, __all__, 1)
        hint = f". Did you mean {close[0]!r}?" if close else ""
        # With a name and an object, Python's own traceback would add the same hint.
        text = f"module 'distcollect' has no attribute {name!r}{hint}"
        raise AttributeError(text, name=name, obj=None)
    value = getattr(_importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
