"""What is said about workers that take long to start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from distcollect.roster.membership import WorkerPhase
from distcollect.roster.process import Process

_PENDING = {
    WorkerPhase.PAUSED: "which has not been started yet",
    WorkerPhase.STARTED: "which has to join",
    WorkerPhase.PROBING: "which makes its envs and policy and tries them",
}
_MAX_NAMED = 5


def start_report(
    phases: Sequence[WorkerPhase],
    processes: Mapping[int, Process],
    elapsed_s: float,
    limit_s: float,
) -> str:
    """Say which workers are awaited, for what, and how long.

    Args:
        phases: of the workers that have to become ready, by worker_id.
        processes: those in the slots, by worker_id.
        elapsed_s: seconds since the start.
        limit_s: after this many seconds the start fails.
    """
    awaited = [worker_id for worker_id, phase in enumerate(phases) if phase in _PENDING]
    named = []
    for worker_id in awaited[:_MAX_NAMED]:
        where = processes[worker_id].where if worker_id in processes else ""
        named.append(f"worker {worker_id}{where}, {_PENDING[phases[worker_id]]}")
    if len(awaited) > _MAX_NAMED:
        named.append(f"{len(awaited) - _MAX_NAMED} more")
    return (
        f"{len(phases) - len(awaited)} of {len(phases)} workers are ready after {elapsed_s:.0f} s; "
        f"waiting up to {limit_s:g} s in all for {'; '.join(named)}"
    )
