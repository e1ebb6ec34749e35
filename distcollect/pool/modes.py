"""Which scheduler each mode has."""

from __future__ import annotations

from distcollect.config import Staleness
from distcollect.pool.async_schedulers import (
    AsyncScheduler,
    BoundedStalenessScheduler,
    RoundRobinScheduler,
)
from distcollect.pool.scheduler import Scheduler
from distcollect.pool.staleness import SentVersions
from distcollect.pool.sync_scheduler import SyncScheduler
from distcollect.pool.worker_slots import BatchPlan, WorkerSlots


def make_scheduler(
    plan: BatchPlan, staleness: Staleness | None, slots: WorkerSlots, versions: SentVersions
) -> Scheduler:
    """The scheduler of a plan's mode; for the arguments see :class:`Scheduler`."""
    if plan.sync:
        return SyncScheduler(plan, slots, versions)
    if plan.in_turn:
        return RoundRobinScheduler(plan, slots, versions)
    if staleness is not None and staleness.mode == "pace":
        return BoundedStalenessScheduler(plan, slots, versions, staleness.max_policy_lag)
    return AsyncScheduler(plan, slots, versions)
