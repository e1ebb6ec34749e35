"""The collectors: what a user iterates over."""

from .base import DataCollectorBase, LagStats
from .inprocess import SyncDataCollector
from .local import MultiaSyncDataCollector, MultiSyncDataCollector, aSyncDataCollector
from .pooled import RPCDataCollector

__all__ = [
    "DataCollectorBase",
    "LagStats",
    "MultiSyncDataCollector",
    "MultiaSyncDataCollector",
    "RPCDataCollector",
    "SyncDataCollector",
    "aSyncDataCollector",
]
