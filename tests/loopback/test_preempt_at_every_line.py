"""A preemption that comes in any line of a worker's collection ends the rollout that it is for."""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future
from typing import Any

import gymnasium as gym
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from helpers.interrupting import ALL_LINES, LineTracer
from helpers.loopback_pool import new_worker

from distcollect.common.threads import do_jobs
from distcollect.engine.pickled_plan import TensorTable
from distcollect.engine.plan import WorkerPlan
from distcollect.rollout.header import Header
from distcollect.transport.protocol import CollectRequest

T = 6


def cart_pole() -> Any:
    return gym.make("CartPole-v1")


def vector() -> Any:
    return SyncVectorEnv([cart_pole], autoreset_mode=AutoresetMode.NEXT_STEP)


class Rollouts:
    """A worker that collects on this thread."""

    def __init__(self, maker: Any) -> None:
        self.worker = new_worker()
        for part in TensorTable([]).pickled(WorkerPlan(maker, 1)):
            self.worker.receive_part(part)
        self._done(self.worker.configure())
        self.sequence = 0

    def _done(self, answer: Future[Any]) -> Any:
        """Do what the worker was asked for, on this thread."""
        self.worker._jobs.put(None)
        do_jobs(self.worker._jobs)
        return answer.result(0)

    def collect(self) -> Header:
        self.sequence += 1
        header, _ = self._done(self.worker.collect(CollectRequest(T, fresh=True)))
        return header

    def preempted_at(self, line: int, *, ahead: int) -> tuple[Header, int | None, bool]:
        """Collect, and preempt at this line the rollout that comes ``ahead`` of this one.

        Returns:
            The header, the steps that had been made at that line (None: there is no such line), and
            whether the preemption took effect at that line: a lock may delay it.
        """
        worker = self.worker
        counter = worker.counter
        begin, sequence = counter.stepped, self.sequence + ahead
        thread = threading.Thread(target=worker.preempt, args=(sequence,))
        made: list[int] = []
        at_once: list[bool] = []

        def preempt() -> None:
            made.append(counter.stepped - begin)
            thread.start()
            thread.join(0.05)
            at_once.append(not thread.is_alive())

        tracer = LineTracer(line, preempt)
        with tracer.tracing():
            header = self.collect()
        if not made:
            return header, None, False
        thread.join(60)
        assert not thread.is_alive()
        return header, made[0], at_once[0]


@pytest.mark.parametrize("maker", [cart_pole, vector])
@pytest.mark.parametrize("ahead", [-1, 0, 1])
def test_a_preemption_in_any_line(maker: Any, ahead: int) -> None:
    rollouts = Rollouts(maker)
    rollouts.collect()
    # In the other cases every third line is tried, unless all are to be.
    stride = 1 if (maker, ahead) == (cart_pole, 0) or os.environ.get(ALL_LINES) else 3
    line, num_exact, made = 1, 0, 0
    while True:
        header, made_then, at_once = rollouts.preempted_at(line, ahead=ahead)
        if made_then is None:
            break
        made = made_then
        expected = {T}
        if ahead == 0 and made < T:
            # It ends after the step that it is in, or before that.
            expected = {max(1, made), made + 1}
        if at_once:
            num_exact += 1
            assert header.num_frames in expected, f"line {line}, after {made} steps"
        following = rollouts.collect().num_frames
        wanted = {T} if ahead < 1 else {1} if at_once else {1, T}
        assert following in wanted, f"line {line}"
        line += stride
    assert num_exact > 100 // stride
    assert made >= T - 1
