"""Rollouts for reinforcement learning, collected by workers over ``torch.distributed.rpc``.

::

    import distcollect as dc

    with dc.RPCDataCollector("CartPole-v1", policy, frames_per_batch=4096) as collector:
        for batch in collector:
            ...
            collector.update_policy_weights_(policy)
"""

from .background import RateLimited, ReplayBuffer
from .broadcast import AutoUpdater, BroadcastUpdater
from .checkpoint import Checkpoint
from .collectors import (
    DataCollectorBase,
    LagStats,
    MultiaSyncDataCollector,
    MultiSyncDataCollector,
    RPCDataCollector,
    SyncDataCollector,
    aSyncDataCollector,
)
from .config import EvaluationWorkers, Faults, Monitor, Staleness, WeightSync
from .envs import EnvContext, PettingZooEnv
from .errors import (
    ArgumentError,
    ArgumentTypeError,
    BatchTimeout,
    CollectorStateError,
    DeadlineError,
    DistCollectError,
    EnvError,
    LaunchError,
    PolicyError,
    PolicyNotSendable,
    RolloutGone,
    SpaceError,
    WeightsError,
    WeightsTimeout,
    WorkerError,
    WorkerLost,
    WorkerMismatch,
)
from .evaluation import Evaluation
from .handle import PushHandle
from .handover import RolloutReference
from .launch import num_workers, run
from .ledger import Frames, LedgerReport
from .membership import State as WorkerState
from .policy import Exploration
from .seats import Pace
from .stats import EpisodeStats, Lags, Stats, TrainerTimes, WorkerStats, WorkerTimes
from .updaters import (
    RPCUpdater,
    SharedMemoryUpdater,
    Source,
    WeightUpdaterBase,
)
from .verdict import Verdict
from .version import __version__

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "AutoUpdater",
    "BatchTimeout",
    "BroadcastUpdater",
    "Checkpoint",
    "CollectorStateError",
    "DataCollectorBase",
    "DeadlineError",
    "DistCollectError",
    "EnvContext",
    "EnvError",
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
    "MultiSyncDataCollector",
    "MultiaSyncDataCollector",
    "Pace",
    "PettingZooEnv",
    "PolicyError",
    "PolicyNotSendable",
    "PushHandle",
    "RPCDataCollector",
    "RPCUpdater",
    "RateLimited",
    "ReplayBuffer",
    "RolloutGone",
    "RolloutReference",
    "SharedMemoryUpdater",
    "Source",
    "SpaceError",
    "Staleness",
    "Stats",
    "SyncDataCollector",
    "TrainerTimes",
    "Verdict",
    "WeightSync",
    "WeightUpdaterBase",
    "WeightsError",
    "WeightsTimeout",
    "WorkerError",
    "WorkerLost",
    "WorkerMismatch",
    "WorkerState",
    "WorkerStats",
    "WorkerTimes",
    "__version__",
    "aSyncDataCollector",
    "num_workers",
    "run",
]
