"""What is said about workers that take long to start."""

from __future__ import annotations

from collections.abc import Iterable

from distcollect.roster.process import Process, ProcessState

_PENDING = {
    ProcessState.STARTED: "which has to join",
    ProcessState.PROBING: "which makes its envs and policy and tries them",
}
_MAX_NAMED = 5


def start_report(
    processes: Iterable[Process], num_first: int, elapsed_s: float, limit_s: float
) -> str:
    """Which workers are awaited, for what, and how long.

    Args:
        processes: those that were started.
        num_first: the slots from 0 to this number have to become ready.
        elapsed_s: seconds since the start.
        limit_s: after this many seconds the start fails.
    """
    newest = {process.worker_id: process for process in processes}
    awaited = [
        (worker_id, newest.get(worker_id))
        for worker_id in range(num_first)
        if worker_id not in newest or newest[worker_id].state in _PENDING
    ]
    named = [
        f"worker {worker_id}, which has not been started yet"
        if process is None
        else f"worker {worker_id}{process.where}, {_PENDING[process.state]}"
        for worker_id, process in awaited[:_MAX_NAMED]
    ]
    if len(awaited) > _MAX_NAMED:
        named.append(f"{len(awaited) - _MAX_NAMED} more")
    return (
        f"{num_first - len(awaited)} of {num_first} workers are ready after {elapsed_s:.0f} s; "
        f"waiting up to {limit_s:g} s in all for {'; '.join(named)}"
    )
