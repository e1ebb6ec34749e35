"""Several threads that take batches of one collector."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from helpers.envs import StepCountEnv
from helpers.loopback_pool import loopback_collector
from helpers.replay_buffers import KeepingBuffer
from helpers.waiting import eventually

import distcollect as dc

_SOON_S = 60
# Found by the envs in this module, as it can't be pickled: set when an env steps, and to go on.
_steps = threading.Event()
_may_step = threading.Event()


class GatedEnv(StepCountEnv):
    """Says when it steps, and steps when it may."""

    def step(self, action: np.int64) -> Any:
        _steps.set()
        assert _may_step.wait(_SOON_S)
        return super().step(action)


def in_process(**options: Any) -> dc.DataCollectorBase:
    return dc.SyncDataCollector(GatedEnv, frames_per_batch=4, **options)


def with_workers(**options: Any) -> dc.DataCollectorBase:
    return loopback_collector(GatedEnv, frames_per_batch=4, num_workers=1, **options)


class GreedyStep(torch.nn.Linear):
    """Acts by the step that it sees."""

    def __init__(self) -> None:
        super().__init__(1, 2)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return super().forward(observation.float().reshape(-1, 1)).argmax(-1)


@pytest.fixture(autouse=True)
def _open_gate() -> Iterator[None]:
    _may_step.set()
    yield
    _may_step.set()


@pytest.fixture(params=[in_process, with_workers])
def collector(request: pytest.FixtureRequest) -> Iterator[dc.DataCollectorBase]:
    with request.param() as made:
        yield made


def waiting_in(call: Callable[[], Any], threads: ThreadPoolExecutor) -> Future[Any]:
    """``call`` on another thread, which waits for a step of the env that may not step."""
    _may_step.clear()
    _steps.clear()
    answer = threads.submit(call)
    assert _steps.wait(_SOON_S)
    return answer


def test_a_second_thread_is_refused_at_once(collector: dc.DataCollectorBase) -> None:
    with ThreadPoolExecutor(1) as threads:
        first = waiting_in(collector.next, threads)
        for call in (collector.next, lambda: next(iter(collector))):
            with pytest.raises(dc.CollectorStateError, match="another thread waits for a batch"):
                call()
        _may_step.set()
        batches = [first.result(_SOON_S), collector.next()]  # now it is this thread's turn
    assert [step for batch in batches for step in batch["observation"].flatten()] == [*range(8)]


def test_envs_and_policy_of_this_process_are_for_one_thread_at_a_time() -> None:
    """Frames would have another policy_version, and an evaluation change the policy's buffers."""
    with in_process(policy=GreedyStep()) as collector, ThreadPoolExecutor(1) as threads:
        first = waiting_in(collector.next, threads)
        for call in (
            collector.update_policy_weights_,
            lambda: collector.evaluate(1),
            lambda: collector.call("step", 0),
            lambda: collector.set_seed(0),
        ):
            with pytest.raises(dc.CollectorStateError, match="or uses its envs and policy"):
                call()
        _may_step.set()
        first.result(_SOON_S)
        answer = waiting_in(lambda: collector.call("step", 0), threads)
        with pytest.raises(dc.CollectorStateError, match="or uses its envs and policy"):
            collector.next()
        _may_step.set()
        answer.result(_SOON_S)
        assert collector.update_policy_weights_() is None
        assert set(collector.next()["collector", "policy_version"].tolist()) == {1}


def test_a_thread_whose_wait_failed_leaves_the_collector_to_others() -> None:
    with with_workers() as collector, ThreadPoolExecutor(1) as threads:
        late = waiting_in(lambda: collector.next(timeout_s=0.05), threads)
        assert isinstance(late.exception(_SOON_S), dc.BatchTimeout)
        _may_step.set()
        assert collector.next().numel() == 4


def test_a_second_thread_that_hands_over() -> None:
    with with_workers(sync=False) as collector, ThreadPoolExecutor(1) as threads:
        assert isinstance(collector, dc.RPCDataCollector)
        first = waiting_in(collector.hand_over, threads)
        for call in (collector.next, collector.hand_over):
            with pytest.raises(dc.CollectorStateError, match="another thread waits for a batch"):
                call()
        _may_step.set()
        first.result(_SOON_S)
        assert collector.next().numel() == 4


def test_the_background_does_not_start_while_a_thread_waits() -> None:
    with in_process(replay_buffer=KeepingBuffer()) as collector, ThreadPoolExecutor(1) as threads:
        first = waiting_in(collector.next, threads)
        with pytest.raises(dc.CollectorStateError, match="another thread waits for a batch"):
            collector.start()
        _may_step.set()
        first.result(_SOON_S)


def test_shutdown_while_another_thread_collects() -> None:
    """The thread gets an error, and the frames that it has stepped are lost."""
    collector = in_process()
    with ThreadPoolExecutor(1) as threads:
        collector.next()
        first = waiting_in(collector.next, threads)
        threading.Timer(0.2, _may_step.set).start()
        collector.shutdown()
        assert isinstance(first.exception(_SOON_S), dc.CollectorStateError)
    assert collector.stats().delivered == 4
    assert collector.stats().lost == {"shut_down": 1}


@pytest.mark.parametrize("in_background", [False, True])
def test_shutdown_by_the_buffer_that_is_given_a_batch(in_background: bool) -> None:
    collector: dc.DataCollectorBase

    class Ending:
        def extend(self, data: Any) -> None:
            collector.shutdown()

    collector = in_process(replay_buffer=Ending())
    begin = time.monotonic()
    if in_background:
        collector.start()
        eventually(lambda: not collector.is_running)
    else:
        collector.next()
    assert time.monotonic() - begin < 5
    assert collector.stats().delivered == 4
    assert not collector.stats().lost
