"""Calls of the envs' methods and evaluation, in worker processes."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from helpers.levels_env import Acts, Levels, T, check_random_numbers

import distcollect as dc


class Slow(Levels):
    def step(self, action: Any) -> Any:
        time.sleep(0.02)
        return super().step(action)


class Painter(Levels):
    """Steps by writing to the memory that a method of it returns."""

    def __init__(self, context: dc.EnvContext) -> None:
        super().__init__(context)
        self.canvas = np.zeros(1_000_000)

    def step(self, action: Any) -> Any:
        self.canvas += 1
        return super().step(action)


class TestCall:
    def test_in_the_middle_of_a_rollout(self) -> None:
        """A rollout takes 4 s; a call is answered at once, and the rollout goes on."""
        with dc.RPCDataCollector(Slow, frames_per_batch=200, num_workers=1) as collector:
            begin = time.monotonic()
            assert collector.call("set_level", 3) == {0: ["0.0 at 3"]}
            assert time.monotonic() - begin < 2
            levels = collector.next()["next", "observation"].squeeze()
            assert levels[-1] == 3
            assert levels.shape == (200,)

    def test_steps_do_not_change_what_was_returned(self) -> None:
        """It is sent while the env goes on."""
        with dc.aSyncDataCollector(Painter, frames_per_batch=100) as collector:
            for _ in range(3):
                collector.next()
                [[canvas]] = collector.call("get_wrapper_attr", "canvas").values()
                assert (canvas == canvas[0]).all()


class TestEvaluate:
    # Not with workers that are threads: they share the random numbers of torch.
    @pytest.mark.parametrize("kind", [dc.MultiSyncDataCollector])
    def test_random_numbers(self, kind: Any) -> None:
        check_random_numbers(kind)


class TestEvaluationWorkers:
    def test_the_run_ends_with_the_last_worker_that_collects(self) -> None:
        options = {"num_workers": 2, "evaluation": dc.EvaluationWorkers()}
        faults = dc.Faults(batch_timeout_s=20)
        with dc.MultiaSyncDataCollector(
            Levels, Acts(0), frames_per_batch=T, faults=faults, **options
        ) as collector:
            collector.release(0)
            with pytest.raises(dc.WorkerLost, match=r"asked to .*; 0 worker\(s\) left"):
                list(collector)

    def test_each_version_in_the_background(self) -> None:
        evaluation = dc.EvaluationWorkers(num_episodes=2)
        with dc.RPCDataCollector(
            Levels,
            Acts(0),
            frames_per_batch=T,
            num_workers=2,
            evaluation=evaluation,
        ) as collector:
            for version in range(1, 4):
                collector.update_policy_weights_(Acts(version % 3))
                batch = collector.next()
                assert (batch["collector", "worker_id"] == 0).all()
                deadline = time.monotonic() + 30
                while not any(e.policy_version[0] == version for e in collector.evaluations):
                    assert time.monotonic() < deadline
                    collector.next()
        for found in collector.evaluations:
            [version] = set(found.policy_version.tolist())
            assert found.returns.tolist() == [5.0 * (version % 3)] * 2
        versions = [int(found.policy_version[0]) for found in collector.evaluations]
        assert versions == sorted(set(versions))
        newest = collector.stats().evaluation
        assert (newest.count, newest.mean_return) == (2, collector.evaluations[-1].mean_return)
