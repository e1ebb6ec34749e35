"""Calling the envs' methods, and evaluating the policy, while collecting."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar
from unittest.mock import patch

import gymnasium as gym
import pytest
import torch
from helpers.churning_workers import ChurningWorkers, churning_collector
from helpers.levels_env import Acts, Levels, T, check_random_numbers
from helpers.loopback_pool import backend_of, loopback_collector, workers_of
from helpers.loopback_transport import LoopbackTransport
from helpers.waiting import eventually
from torch import nn

import distcollect as dc
from distcollect.transport.worker_service import WorkerService


def sync(*args: Any, **settings: Any) -> Any:
    return dc.SyncDataCollector(*args, frames_per_batch=2 * T, envs_per_worker=2, **settings)


def pooled(*args: Any, **settings: Any) -> Any:
    sizes = {"frames_per_batch": 2 * T, "envs_per_worker": 2, "num_workers": 2}
    return loopback_collector(*args, **{**sizes, **settings})


class TestCall:
    def test_every_env(self) -> None:
        with pooled(Levels) as collector:
            assert collector.call("set_level", 3) == {
                0: ["0.0 at 3", "0.1 at 3"],
                1: ["1.0 at 3", "1.1 at 3"],
            }
            assert collector.call("set_level", 3, plus=1, worker_ids=1) == {
                1: ["1.0 at 4", "1.1 at 4"]
            }
            assert collector.call("name", worker_ids=[0]) == {0: ["0.0", "0.1"]}

    def test_a_vector_env(self) -> None:
        def make() -> Any:
            context = dc.EnvContext(worker_id=0, env_index=0, incarnation=0, seed=None)
            return gym.vector.SyncVectorEnv([lambda: Levels(context)] * 2)

        with dc.SyncDataCollector(make, frames_per_batch=2 * T) as collector:
            assert collector.call("set_level", 3) == {0: ["0.0 at 3"] * 2}

    @pytest.mark.parametrize(
        ("method", "arguments", "error", "message"),
        [
            ("set_leevl", [1], dc.EnvError, "set_leevl"),
            ("set_level", [-1], dc.EnvError, "no level -1"),
        ],
    )
    @pytest.mark.parametrize("make", [sync, pooled])
    def test_what_fails_goes_on(
        self, make: Any, method: str, arguments: Any, error: Any, message: str
    ) -> None:
        with make(Levels) as collector:
            with pytest.raises(error, match=message):
                collector.call(method, *arguments)
            assert collector.next().shape == (2, T)

    def test_what_cannot_be_sent(self) -> None:
        with pooled(Levels) as collector:
            with pytest.raises(dc.ArgumentTypeError, match=r"call\('set_level'\): .*be pickled"):
                collector.call("set_level", lambda: 3)
            assert collector.call("set_level", 3, worker_ids=0) == {0: ["0.0 at 3", "0.1 at 3"]}

    def test_unknown_worker(self) -> None:
        with pooled(Levels) as collector, pytest.raises(ValueError, match=r"no worker \[7\]"):
            collector.call("name", worker_ids=7)


class TestEvaluate:
    @pytest.mark.parametrize("make", [sync, pooled])
    def test_makers_know_which_envs_are_for_it(self, make: Any) -> None:
        made = []

        def make_env(context: dc.EnvContext) -> Levels:
            made.append((context.worker_id, context.env_index, context.for_evaluation))
            return Levels(context)

        with make(make_env) as collector:
            collector.next()
            before = sorted(made)
            assert not any(for_evaluation for *_, for_evaluation in before)
            made.clear()
            collector.evaluate(4)
        assert sorted(made) == [(worker, env, True) for worker, env, _ in before]

    @pytest.mark.parametrize("make", [sync, pooled])
    def test_whole_episodes(self, make: Any) -> None:
        with make(Levels, Acts(2)) as collector:
            found = collector.evaluate(7)
            assert found.returns.tolist() == [10.0] * 7  # five frames with reward 2
            assert found.lengths.tolist() == [5] * 7
            assert found.policy_version.tolist() == [0] * 7
            assert found.mean_return == 10
            assert found.mean_length == 5
            collector.update_policy_weights_(Acts(1))
            found = collector.evaluate(1)
            assert (found.returns.item(), found.policy_version.item()) == (5.0, 1)
            newest = collector.stats().evaluation
        assert (newest.count, newest.mean_return, newest.mean_length) == (1, 5.0, 5.0)

    @pytest.mark.parametrize("make", [sync, partial(pooled, sync=True, num_workers=1)])
    def test_buffers_that_the_policy_changes_stay_as_they_were(self, make: Any) -> None:
        with make(Levels, Counts()) as collector:
            before, _, after = collector.next(), collector.evaluate(4), collector.next()
        for name in ("in_place", "anew"):
            first, last = int(before[name][0, 0]), int(after[name][0, -1])
            assert last == first + 2 * T - 1, name

    @pytest.mark.parametrize("kind", [dc.SyncDataCollector])
    def test_random_numbers(self, kind: Any) -> None:
        check_random_numbers(kind)

    def test_deadline(self) -> None:
        with (
            pooled(Endless) as collector,
            pytest.raises(dc.DeadlineError, match="not over, after"),
        ):
            collector.evaluate(1, timeout_s=0.2)


class Counts(nn.Module):
    """Writes how often it was called before, by buffers of two kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("in_place", torch.zeros(1))
        self.register_buffer("anew", torch.zeros(1), persistent=False)

    def forward(self, observation: torch.Tensor) -> Any:
        n = len(observation)
        told = {name: buffer.expand(n).clone() for name, buffer in self.named_buffers()}
        self.in_place += 1
        self.anew = self.anew + 1
        return torch.zeros(n, dtype=torch.int64), told


class Endless(Levels):
    def step(self, action: Any) -> Any:
        return self._seen(), 0.0, False, False, {}


class TestEvaluationWorkers:
    def test_sync_batches_are_shared_by_the_others(self) -> None:
        with loopback_collector(
            Levels,
            sync=True,
            frames_per_batch=2 * T,
            num_workers=3,
            evaluation=dc.EvaluationWorkers(),
        ) as collector:
            assert collector.next()["collector", "worker_id"][:, 0].tolist() == [0, 1]

    def test_the_end_of_a_run_leaves_out_the_newest_version(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        """And says nothing of it."""
        caplog.set_level(logging.WARNING)  # a test before may have left another one
        evaluation = dc.EvaluationWorkers(num_episodes=1)
        with loopback_collector(
            Waits, Acts(1), frames_per_batch=T, num_workers=2, evaluation=evaluation
        ) as collector:
            eventually(Waits.has_begun.is_set)
            collector.update_policy_weights_(Acts(2))
            threading.Timer(0.1, Waits.may_end.set).start()
        assert [record.getMessage() for record in caplog.records] == []

    def test_no_setup_waits_for_them(self) -> None:
        with loopback_collector(
            WaitsOnceMore,
            Acts(1),
            frames_per_batch=T,
            num_workers=2,
            evaluation=dc.EvaluationWorkers(num_episodes=1),
            faults=dc.Faults(batch_timeout_s=5),
        ) as collector:
            try:
                eventually(WaitsOnceMore.has_begun.is_set)
                collector.set_seed(1)
                collector.pre_collect_hook = None
                collector.load_state_dict({**collector.state_dict(), "policy_version": 3})
            finally:
                WaitsOnceMore.may_end.set()
            eventually(lambda: collector.evaluations)
            assert collector.evaluations[0].policy_version.tolist() == [3]

    def test_episodes_of_one_version_are_one_evaluation(self) -> None:
        evaluation = dc.EvaluationWorkers(num_workers=2, num_episodes=2)
        settings = {"frames_per_batch": T, "num_workers": 3, "evaluation": evaluation}
        with loopback_collector(WaitsAtLast, Acts(1), **settings) as collector:
            eventually(lambda: len(collector.evaluations) == 1)
            assert collector.stats().evaluation.count == 0
            WaitsAtLast.may_end.set()
            eventually(lambda: collector.stats().evaluation.count)
            stats = collector.stats()
            assert (stats.evaluation.count, len(collector.evaluations)) == (4, 2)
            assert [each.num_evaluated for each in stats.workers.values()] == [0, 2, 2]

    def test_the_end_of_a_run_closes_their_envs(self, caplog: pytest.LogCaptureFixture) -> None:
        """In the midst of an evaluation, between two steps; nothing is said of it."""
        caplog.set_level(logging.WARNING)
        evaluation = dc.EvaluationWorkers(num_episodes=1)
        with loopback_collector(
            LongEpisodes, frames_per_batch=T, num_workers=2, evaluation=evaluation
        ):
            eventually(LongEpisodes.has_begun.is_set)
        assert LongEpisodes.closed == {"0.0": 1, "1.0": 2}
        assert [record.getMessage() for record in caplog.records] == []


class LongEpisodes(Levels):
    """Those of the evaluation worker last as long as the test may take."""

    has_begun = threading.Event()
    closed: ClassVar[Counter[str]] = Counter()

    def step(self, action: Any) -> Any:
        if self.name.startswith("1"):
            self.has_begun.set()
            return self._seen(), 0.0, False, False, {}
        return super().step(action)

    def close(self) -> None:
        self.closed[self.name] += 1


class Waits(Levels):
    has_begun, may_end = threading.Event(), threading.Event()

    def step(self, action: Any) -> Any:
        if self.name.startswith("1"):
            self.has_begun.set()
            assert self.may_end.wait(10)
        return super().step(action)


class WaitsAtLast(Waits):
    """Which of two evaluation workers is the first, is not known before."""

    may_end = threading.Event()
    firsts: ClassVar[list[str]] = []

    def step(self, action: Any) -> Any:
        worker = self.name[0]
        if worker != "0":
            self.firsts.append(worker)
            assert self.firsts[0] == worker or self.may_end.wait(10)
        return Levels.step(self, action)


class WaitsOnceMore(Waits):
    has_begun, may_end = threading.Event(), threading.Event()


def test_an_evaluation_waits_for_a_worker_that_is_being_replaced() -> None:
    may_join, join = threading.Event(), ChurningWorkers._join

    def join_late(workers: ChurningWorkers, *args: Any) -> None:
        may_join.wait(60)
        join(workers, *args)

    with churning_collector(Levels, frames_per_batch=T, num_workers=1) as collector:
        with patch.object(ChurningWorkers, "_join", join_late):
            workers = workers_of(collector)
            workers.kill(0)
            eventually(lambda: not workers.observer.present)
            threading.Timer(0.1, may_join.set).start()
            assert len(collector.evaluate(2, timeout_s=60).returns) == 2
        assert workers.incarnations == {0: 1}


def test_an_evaluation_waits_for_nobody_if_only_evaluation_workers_are_left() -> None:
    with churning_collector(
        Levels,
        frames_per_batch=T,
        num_workers=2,
        evaluation=dc.EvaluationWorkers(num_workers=1, num_episodes=1),
    ) as collector:
        collector.next()
        workers = workers_of(collector)
        workers.leave(0)
        eventually(lambda: workers.observer.worker_ids == (1,))
        with pytest.raises(dc.WorkerLost, match="no worker is there"):
            collector.evaluate(2, timeout_s=1e6)  # longer than the test may take


@contextlib.contextmanager
def without_weights(**options: Any) -> Iterator[tuple[Any, Callable[[], None]]]:
    """A collector whose worker was replaced after a push; the second of the pair sends weights."""
    may_send, send = threading.Event(), LoopbackTransport.call

    def send_late(transport: LoopbackTransport, peer: int, method: Any, *args: Any) -> Any:
        if method is WorkerService.receive_weights:
            assert may_send.wait(60)
        return send(transport, peer, method, *args)

    with churning_collector(Levels, Acts(1), frames_per_batch=T, **options) as collector:
        workers, evaluator = workers_of(collector), options["num_workers"] - 1  # the last one
        collector.next()
        collector.update_policy_weights_(Acts(2))
        if "evaluation" in options:
            eventually(lambda: [1] in [e.policy_version.tolist() for e in collector.evaluations])
        try:
            with patch.object(LoopbackTransport, "call", send_late):
                workers.kill(evaluator)
                workers.settle()
                yield collector, may_send.set
        finally:
            may_send.set()


@pytest.mark.parametrize("named", [None, 0])
def test_a_replacement_evaluates_with_the_newest_weights(named: int | None) -> None:
    with without_weights(num_workers=1) as (collector, send):
        threading.Timer(0.1, send).start()
        found = collector.evaluate(2, worker_ids=named, timeout_s=60)
    assert found.policy_version.tolist() == [1, 1]
    assert found.returns.tolist() == [10.0, 10.0]


def test_a_replacement_that_gets_no_weights_evaluates_nothing() -> None:
    with (
        without_weights(num_workers=1) as (collector, _),
        pytest.raises(dc.DeadlineError, match="wait for their first weights"),
    ):
        collector.evaluate(2, timeout_s=0.2)


def test_an_evaluation_worker_that_is_replaced_evaluates_no_first_weights() -> None:
    evaluation = dc.EvaluationWorkers(num_workers=1, num_episodes=1)
    with without_weights(num_workers=2, evaluation=evaluation) as (collector, send):
        before = len(collector.evaluations)
        backend_of(collector).pool.on_weights(1, 1)  # the process before it told so late
        send()
        eventually(lambda: len(collector.evaluations) > before)
        assert collector.evaluations[-1].policy_version.tolist() == [1]
