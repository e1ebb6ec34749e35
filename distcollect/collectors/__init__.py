"""The collectors: what a user iterates over."""

from distcollect.collectors.base import DataCollectorBase, LagStats
from distcollect.collectors.local import (
    MultiaSyncDataCollector,
    MultiSyncDataCollector,
    aSyncDataCollector,
)
from distcollect.collectors.rpc import RPCDataCollector
from distcollect.collectors.sync import SyncDataCollector

__all__ = [
    "DataCollectorBase",
    "LagStats",
    "MultiSyncDataCollector",
    "MultiaSyncDataCollector",
    "RPCDataCollector",
    "SyncDataCollector",
    "aSyncDataCollector",
]
