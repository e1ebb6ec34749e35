"""Workers that hang in something else than collecting are found, and replaced."""

from __future__ import annotations

import ctypes
import re
import socket
import sys
import time
from typing import Any

import cloudpickle
import pytest
from helpers.envs import ProcessIdEnv
from helpers.marked import Marked
from helpers.waiting import eventually

import distcollect as dc

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers can't import test modules

T = 4
HOST = re.escape(socket.gethostname())

# Each wait has its own deadline; workers start several times, which takes long on a busy machine.
pytestmark = pytest.mark.timeout(400)


class HangsInEvaluation(ProcessIdEnv):
    """Of the first process, each env but the first to be made never ends its third step."""

    num_made = 0

    def __init__(self, context: dc.EnvContext) -> None:
        super().__init__(length=5, reward=1)
        HangsInEvaluation.num_made += 1
        self.hangs = context.incarnation == 0 and HangsInEvaluation.num_made > 1

    def step(self, action: Any) -> Any:
        if self.hangs and self.steps == 2:
            self.take_a_long_nap()
        return super().step(action)

    def take_a_long_nap(self) -> None:
        time.sleep(1000)


class HangsWhenCalled(ProcessIdEnv):
    def __init__(self, context: dc.EnvContext) -> None:
        super().__init__()
        self.context = context

    def unpicklable(self) -> Any:
        return lambda: None

    def hang(self, worker_id: int) -> int:
        if self.context.worker_id == worker_id:
            mutex = ctypes.create_string_buffer(64)
            for _ in range(2):  # the second time for ever, and with the interpreter's lock
                ctypes.PyDLL(None).pthread_mutex_lock(mutex)
        return self.context.incarnation


def test_in_an_evaluation(marked: Marked) -> None:
    faults = dc.Faults(step_timeout_s=3)
    with dc.RPCDataCollector(
        HangsInEvaluation, num_workers=1, frames_per_batch=T, faults=faults
    ) as collector:
        with pytest.raises(
            dc.WorkerLost,
            match=r"no worker is there .*worker 0: its envs finished no step within \d.* in an "
            r"evaluation; it was in take_a_long_nap \(.*\), called by step "
            rf".*\(pid \d+ on {HOST}\)",
        ):
            collector.evaluate(2, timeout_s=300)
        eventually(lambda: collector.num_workers == 1, 60)
        assert collector.evaluate(2).returns.tolist() == [5, 5]
        assert collector.next().shape == (1, T)


def test_on_an_evaluation_worker(marked: Marked) -> None:
    with dc.RPCDataCollector(
        HangsInEvaluation,
        num_workers=2,
        frames_per_batch=T,
        faults=dc.Faults(step_timeout_s=3),
        evaluation=dc.EvaluationWorkers(num_episodes=2),
    ) as collector:
        deadline = time.monotonic() + 60
        while not collector.evaluations:
            assert time.monotonic() < deadline
            collector.next()
        assert collector.evaluations[0].returns.tolist() == [5, 5]


@pytest.mark.parametrize("sync", [True, False])
def test_in_a_call(marked: Marked, sync: bool) -> None:
    """Between two rollouts, or in the middle of one; a step may take longer than the call."""
    with dc.RPCDataCollector(
        HangsWhenCalled, num_workers=2, frames_per_batch=2 * T, sync=sync
    ) as collector:
        assert collector.call("hang", 2, timeout_s=60) == {0: [0], 1: [0]}
        with pytest.raises(
            dc.DeadlineError,
            match=r"worker 1 did not answer call\('hang'\) within 2 s, and is replaced: a method "
            rf"of its envs .* within \d.* it was in hang \([^()]*\) \(pid \d+ on {HOST}\)",
        ):
            collector.call("hang", 1, timeout_s=2)
        eventually(lambda: collector.num_workers == 2, 60)
        assert collector.call("hang", 2, timeout_s=60) == {0: [0], 1: [1]}
        collector.next()
        with pytest.raises(dc.EnvError, match="what 'unpicklable' returned can't be pickled"):
            collector.call("unpicklable")


def hang_as_worker_1(context: dc.EnvContext) -> ProcessIdEnv:
    if context.worker_id == 1:
        take_a_long_nap()
    return ProcessIdEnv()


def take_a_long_nap() -> None:
    time.sleep(1000)


def test_in_the_start(marked: Marked) -> None:
    with pytest.raises(
        dc.DeadlineError,
        match=r"^worker 1 did not make and reset its envs within 20 s; .* it was in "
        r"take_a_long_nap \([^()]*\), called by hang_as_worker_1 \([^()]*\)$",
    ):
        dc.MultiSyncDataCollector(
            hang_as_worker_1,
            num_workers=2,
            frames_per_batch=T,
            faults=dc.Faults(start_timeout_s=20),
        )
    assert not marked.left()
