# What type checkers see of the package: `__init__.py` imports each name at its first use.

from distcollect.collectors.base import BaseCollector as BaseCollector
from distcollect.collectors.base import DataCollectorBase as DataCollectorBase
from distcollect.collectors.checkpoint import Checkpoint as Checkpoint
from distcollect.collectors.classes import AsyncCollector as AsyncCollector
from distcollect.collectors.classes import Collector as Collector
from distcollect.collectors.classes import DistributedCollector as DistributedCollector
from distcollect.collectors.classes import DistributedDataCollector as DistributedDataCollector
from distcollect.collectors.classes import DistributedSyncCollector as DistributedSyncCollector
from distcollect.collectors.classes import (
    DistributedSyncDataCollector as DistributedSyncDataCollector,
)
from distcollect.collectors.classes import MultiAsyncCollector as MultiAsyncCollector
from distcollect.collectors.classes import MultiaSyncDataCollector as MultiaSyncDataCollector
from distcollect.collectors.classes import MultiCollector as MultiCollector
from distcollect.collectors.classes import MultiSyncCollector as MultiSyncCollector
from distcollect.collectors.classes import MultiSyncDataCollector as MultiSyncDataCollector
from distcollect.collectors.classes import RPCCollector as RPCCollector
from distcollect.collectors.classes import RPCDataCollector as RPCDataCollector
from distcollect.collectors.classes import SyncDataCollector as SyncDataCollector
from distcollect.collectors.classes import aSyncDataCollector as aSyncDataCollector
from distcollect.collectors.replay import Prioritized as Prioritized
from distcollect.collectors.replay import RateLimited as RateLimited
from distcollect.collectors.replay import ReplayBuffer as ReplayBuffer
from distcollect.config import EvaluationWorkers as EvaluationWorkers
from distcollect.config import Faults as Faults
from distcollect.config import Monitor as Monitor
from distcollect.config import Normalize as Normalize
from distcollect.config import Staleness as Staleness
from distcollect.config import WeightSync as WeightSync
from distcollect.envs.make import EnvContext as EnvContext
from distcollect.errors import ArgumentError as ArgumentError
from distcollect.errors import ArgumentTypeError as ArgumentTypeError
from distcollect.errors import BatchTimeout as BatchTimeout
from distcollect.errors import CollectorStateError as CollectorStateError
from distcollect.errors import DeadlineError as DeadlineError
from distcollect.errors import DistCollectError as DistCollectError
from distcollect.errors import EnvError as EnvError
from distcollect.errors import LaunchError as LaunchError
from distcollect.errors import PolicyError as PolicyError
from distcollect.errors import PolicyKeyError as PolicyKeyError
from distcollect.errors import PolicyNotSendable as PolicyNotSendable
from distcollect.errors import PolicySignatureError as PolicySignatureError
from distcollect.errors import RolloutGone as RolloutGone
from distcollect.errors import SpaceError as SpaceError
from distcollect.errors import WeightsError as WeightsError
from distcollect.errors import WeightsTimeout as WeightsTimeout
from distcollect.errors import WorkerError as WorkerError
from distcollect.errors import WorkerLost as WorkerLost
from distcollect.errors import WorkerMismatch as WorkerMismatch
from distcollect.integrations.pettingzoo import PettingZooEnv as PettingZooEnv
from distcollect.integrations.ray.collector import RayCollector as RayCollector
from distcollect.integrations.ray.collector import RayDataCollector as RayDataCollector
from distcollect.integrations.slurm.delayed import (
    submitit_delayed_launcher as submitit_delayed_launcher,
)
from distcollect.launch.run import num_workers as num_workers
from distcollect.launch.run import run as run
from distcollect.policy.base import Exploration as Exploration
from distcollect.policy.noise import EpsilonGreedy as EpsilonGreedy
from distcollect.policy.noise import GaussianNoise as GaussianNoise
from distcollect.policy.noise import LinearSchedule as LinearSchedule
from distcollect.policy.noise import OrnsteinUhlenbeckNoise as OrnsteinUhlenbeckNoise
from distcollect.pool.handover import RolloutReference as RolloutReference
from distcollect.results import EnvFault as EnvFault
from distcollect.results import EpisodeStats as EpisodeStats
from distcollect.results import Evaluation as Evaluation
from distcollect.results import EvaluationStats as EvaluationStats
from distcollect.results import Frames as Frames
from distcollect.results import Lags as Lags
from distcollect.results import LagStats as LagStats
from distcollect.results import LedgerReport as LedgerReport
from distcollect.results import Stats as Stats
from distcollect.results import TrainerTimes as TrainerTimes
from distcollect.results import WorkerState as WorkerState
from distcollect.results import WorkerStats as WorkerStats
from distcollect.results import WorkerThroughput as WorkerThroughput
from distcollect.results import WorkerTimes as WorkerTimes
from distcollect.telemetry.bottleneck import Bottleneck as Bottleneck
from distcollect.transport.worker_service import WeightSource as WeightSource
from distcollect.version import __version__ as __version__
from distcollect.weights.broadcast import AutoUpdater as AutoUpdater
from distcollect.weights.broadcast import BroadcastUpdater as BroadcastUpdater
from distcollect.weights.push_handle import PushHandle as PushHandle
from distcollect.weights.updaters import SharedMemoryUpdater as SharedMemoryUpdater
from distcollect.weights.updaters import TransportUpdater as TransportUpdater
from distcollect.weights.updaters import WeightUpdaterBase as WeightUpdaterBase
