"""The states of a worker process, and the phases of a collector's workers."""

from __future__ import annotations

from itertools import product

import pytest

from distcollect.common.process_exit import ProcessExit
from distcollect.errors import DeadlineError, WorkerLost
from distcollect.roster.process import IllegalTransition, Process, ProcessState
from distcollect.roster.status import Phase, Status

LEGAL = {
    (ProcessState.STARTED, ProcessState.PROBING),
    (ProcessState.PROBING, ProcessState.READY),
    (ProcessState.READY, ProcessState.DRAINING),
    (ProcessState.DRAINING, ProcessState.EXITING),
    (ProcessState.LOST, ProcessState.ACCOUNTED),
    *((state, ProcessState.LOST) for state in list(ProcessState)[:5]),
}
LEGAL_PHASES = {
    (Phase.STARTING, Phase.START_FAILED),
    (Phase.STARTING, Phase.RUNNING),
    (Phase.RUNNING, Phase.FAILED),
    (Phase.STOPPING, Phase.CLOSED),
    *((phase, Phase.STOPPING) for phase in list(Phase)[:4]),
}


@pytest.mark.parametrize(("before", "after"), [*product(ProcessState, repeat=2)])
def test_transitions_of_a_process(before: ProcessState, after: ProcessState) -> None:
    process = Process(0, 0, 1, before)
    if (before, after) in LEGAL:
        process.enter(after, 5.0)
        assert (process.state, process.deadline) == (after, 5.0)
    else:
        with pytest.raises(IllegalTransition, match=before.name):
            process.enter(after)
        assert process.state is before


@pytest.mark.parametrize(("before", "after"), [*product(Phase, repeat=2)])
def test_transitions_of_the_phase(before: Phase, after: Phase) -> None:
    status = Status()
    status.phase = before
    if (before, after) in LEGAL_PHASES:
        status.enter(after)
        assert status.phase is after
    else:
        with pytest.raises(IllegalTransition, match=before.name):
            status.enter(after)
        assert status.phase is before


@pytest.mark.parametrize("phase", Phase)
def test_a_failure_is_legal_in_every_phase(phase: Phase) -> None:
    status = Status()
    status.phase = phase
    first, second = WorkerLost("first"), WorkerLost("second")
    status.fail(first)
    status.fail(second)
    assert status.failure is first
    failed = {Phase.STARTING: Phase.START_FAILED, Phase.RUNNING: Phase.FAILED}
    assert status.phase is failed.get(phase, phase)
    assert not status.starts_processes


@pytest.mark.parametrize("phase", Phase)
def test_stopping_begins_once(phase: Phase) -> None:
    status = Status()
    status.phase = phase
    assert status.begin_stop() == (phase not in (Phase.STOPPING, Phase.CLOSED))
    assert not status.begin_stop()
    assert status.is_stopping


def test_the_error_of_a_death_says_how_far_the_process_was() -> None:
    early = Process(3, 0, 1)
    early.exit = ProcessExit(-9, 0)
    early.enter(ProcessState.LOST)
    assert "before it had joined: killed by SIGKILL" in str(early.death)
    late = Process(3, 0, 1)
    late.enter(ProcessState.PROBING)
    assert isinstance(late.overdue("", 7.0), DeadlineError)
    assert "did not make and reset its envs within 7 s" in str(late.overdue("", 7.0))
    late.enter(ProcessState.LOST)
    assert "its connection to the trainer broke off" in str(late.death)
    late.exit = ProcessExit(1, 0)
    assert "its process ended: exit code 1" in str(late.death)
    assert late.cause(left=False) == "worker_lost"
    late.exit = ProcessExit(-9, 0, "it hung")
    assert "it hung" in str(late.death)
    assert late.cause(left=False) == "hung"
    late.is_retired = True
    assert late.cause(left=False) == "retired"
    assert late.cause(left=True) == "left"
