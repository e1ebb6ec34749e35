"""When the run ends because every replacement of a worker fails like the process before it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from unittest.mock import Mock

import pytest

from distcollect.common.process_exit import ProcessExit
from distcollect.config import Faults
from distcollect.errors import EnvError, WorkerLost
from distcollect.net.messages import Exited
from distcollect.pool.first_failures import FirstFailures
from distcollect.pool.worker_slots import WorkerSlot
from distcollect.roster.lifecycle import Lifecycle
from distcollect.roster.status import RunPhase, Status
from distcollect.transport.failure import Failure


def test_all_workers_have_to_fail_three_times_by_the_same_error() -> None:
    failures = FirstFailures()

    def fails(
        worker_id: int, incarnation: int, error: BaseException, num_requests: int = 1
    ) -> bool:
        slot = WorkerSlot(worker_id, incarnation, 0, num_requests=num_requests)
        return failures.is_final(slot, error, [0, 1])

    for incarnation in range(5):
        assert not fails(0, incarnation, EnvError(f"worn out (pid {incarnation})", worker_id=0))
    assert not fails(1, 0, EnvError("worn out (pid 7)", worker_id=1))
    assert not fails(1, 0, EnvError("worn out (pid 7)", worker_id=1))  # the same process
    assert not fails(1, 1, ValueError("another"))
    assert not fails(1, 2, EnvError("worn out (pid 8)", worker_id=1))
    assert not fails(1, 3, WorkerLost("killed"))
    assert not fails(1, 4, EnvError("worn out (pid 9)", worker_id=1))
    failures.collected(0)
    assert not fails(1, 5, EnvError("worn out (pid 9)", worker_id=1))
    for incarnation in (6, 7):
        assert not fails(0, incarnation, EnvError("worn out (pid 9)", worker_id=0))
    assert not fails(0, 8, EnvError("worn out (pid 9)", worker_id=0), num_requests=2)
    assert fails(0, 9, EnvError("worn out (pid 9)", worker_id=0))


def test_a_worker_that_collects_nothing_does_not_end_the_run() -> None:
    """Those that collected have left, and others may come."""
    failures = FirstFailures()
    assert not failures.is_final(WorkerSlot(3, 0, 0), EnvError("worn out", worker_id=3), [])


def test_an_env_that_no_replacement_cures_ends_a_run_that_has_collected_nothing() -> None:
    failures, raised = FirstFailures(), EnvError("returned None as the reward")
    raised.is_permanent = True
    error = Failure.of(raised, 1).error()
    assert failures.is_final(WorkerSlot(1, 0, 0, num_requests=2), error, [0, 1])
    failures.collected(0)
    assert not failures.is_final(WorkerSlot(1, 0, 0, num_requests=2), error, [0, 1])


def lifecycle_of_two(status: Status, post: Callable[[Callable[[], None]], None]) -> Lifecycle:
    hosts = Mock(**{"num_workers.return_value": 2})
    return Lifecycle(hosts, Mock(), Faults(), Mock(), status, num_first=2, post=post)


@pytest.mark.parametrize("ends_first", [True, False])
def test_what_a_scheduler_says_of_a_worker_that_it_gives_up_is_logged_once(
    caplog: pytest.LogCaptureFixture, ends_first: bool
) -> None:
    status = Status()
    lifecycle = lifecycle_of_two(status, lambda event: event())
    lifecycle.check()
    status.enter(RunPhase.RUNNING)
    lifecycle.slot_closed(0)
    if ends_first:
        lifecycle.reported(Exited(0, 0, ProcessExit(1, 0)))
        lifecycle.check()
    lifecycle.slot_given_up(0, "its node is gone")
    if not ends_first:
        lifecycle.reported(Exited(0, 0, ProcessExit(1, 0)))
        lifecycle.check()
    first, *others = caplog.messages
    assert first.startswith("worker 0 is lost: its process ended")
    assert len(others) == ends_first
    assert " ".join(caplog.messages).count("not replaced: its node is gone") == 1


def test_the_run_ends_also_if_the_worker_owes_other_answers() -> None:
    """They fail when it is lost, before it is known how its process ended."""
    status = Status()
    posted: deque[Callable[[], None]] = deque()
    lifecycle = lifecycle_of_two(status, posted.append)
    lifecycle.check()
    status.enter(RunPhase.RUNNING)
    error = EnvError("worn out", worker_id=0)
    lifecycle.report(0, 0, error, is_final=True)
    lifecycle.report(0, 0, WorkerLost("peer 1 is gone"))
    lifecycle.reported(Exited(0, 0, ProcessExit(1, 0)))
    while posted:
        posted.popleft()()
    lifecycle.check()
    assert status.failure is error
