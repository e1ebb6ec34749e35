"""The phases of a collector's workers, and why a worker process ended."""

from __future__ import annotations

import pytest

from distcollect.common.process_exit import ProcessExit
from distcollect.errors import (
    DeadlineError,
    DistCollectError,
    EnvError,
    PolicyKeyError,
    WorkerLost,
)
from distcollect.roster.membership import WorkerPhase
from distcollect.roster.process import Process
from distcollect.roster.status import RunPhase, Status


def test_the_first_failure_counts_and_who_stops_begins_no_more() -> None:
    status = Status()
    first, second = WorkerLost("first"), WorkerLost("second")
    status.fail(first)
    status.fail(second)
    assert status.failure is first
    assert status.is_starting
    status.enter(RunPhase.STOPPING)
    status.enter(RunPhase.RUNNING)
    assert status.is_stopping


def test_the_error_of_a_death_says_how_far_the_process_was() -> None:
    early = Process(3, 0, 1, over_rpc=True)
    early.exit = ProcessExit(-9, 0)
    early.ended_in = WorkerPhase.STARTED
    assert "before it had joined: killed by SIGKILL" in str(early.death(left=False))
    late = Process(3, 0, 1, over_rpc=True)
    overdue = late.overdue(WorkerPhase.PROBING, "", 7.0)
    assert isinstance(overdue, DeadlineError)
    assert "did not make and reset its envs within 7 s" in str(overdue)
    late.ended_in = WorkerPhase.PROBING
    assert "its connection to the trainer broke off" in str(late.death(left=False))
    late.exit = ProcessExit(1, 0)
    assert "its process ended: exit code 1" in str(late.death(left=False))
    assert late.cause(left=False) == "worker_lost"
    late.exit = ProcessExit(-9, 0, "it hung")
    assert "it hung" in str(late.death(left=False))
    assert late.cause(left=False) == "hung"
    late.is_retired = True
    assert late.cause(left=False) == "retired"
    assert late.cause(left=True) == "left"
    assert late.cause(left=False, stopping=True) == "shut_down"


@pytest.mark.parametrize(
    ("failure", "cause"),
    [(PolicyKeyError("x"), "policy_failed"), (EnvError("x"), "env_failed")],
)
def test_frames_are_lost_by_what_the_users_code_raised(
    failure: DistCollectError, cause: str
) -> None:
    failed = Process(3, 0, 1, over_rpc=True, failure=failure)
    failed.exit = ProcessExit(-9, 0)
    assert failed.cause(left=False) == failed.cause(left=False, stopping=True) == cause
