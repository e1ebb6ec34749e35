"""The collectors: what a user iterates over."""

from .base import DataCollectorBase, LagStats
from .inprocess import SyncDataCollector
from .pooled import RPCDataCollector

__all__ = ["DataCollectorBase", "LagStats", "RPCDataCollector", "SyncDataCollector"]
