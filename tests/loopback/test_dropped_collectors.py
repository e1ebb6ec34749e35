"""A collector that is dropped without shutdown() ends its workers."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers.envs import SamplingEnv
from helpers.loopback_pool import loopback_collector, workers_of
from helpers.replay_buffers import KeepingBuffer
from helpers.waiting import eventually
from tensordict import TensorDict

import distcollect as dc
from distcollect.collectors.finalizer import forgotten_closings


class Trainer:
    """Passes a method of its own to its collector, which so refers back to it."""

    def __init__(self) -> None:
        self.batches = 0
        self.collector = loopback_collector(
            "CartPole-v1", frames_per_batch=8, num_workers=1, postproc=self.postprocess
        )

    def postprocess(self, batch: TensorDict) -> TensorDict:
        self.batches += 1
        return batch


def test_an_argument_that_refers_to_the_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    # A worker exempts what is there from garbage collection; here it is in this process.
    monkeypatch.setattr(gc, "freeze", lambda: None)
    trainer = Trainer()
    trainer.collector.next()
    assert trainer.batches == 1
    collector = weakref.ref(trainer.collector)
    workers = workers_of(trainer.collector)
    closed = threading.Event()
    close, workers.close = workers.close, lambda: (close(), closed.set())
    del trainer
    gc.collect()
    assert collector() is None
    assert closed.wait(60)


class Policy(torch.nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(size, 1)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return (self.layer(observation) > 0).long().flatten()


@pytest.fixture
def _no_gc() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def used(collector: Any) -> None:
    for _ in range(2):
        collector.next()
        collector.update_policy_weights_()
    collector.evaluate(1)
    str(collector.stats())
    with contextlib.suppress(dc.BatchTimeout):
        collector.next(timeout_s=1e-6)


def filling(collector: Any) -> None:
    collector.start()
    eventually(lambda: len(collector.replay_buffer.added) > 2)


USES = pytest.mark.parametrize("use", [str, used, filling])
KINDS = [dc.RPCDataCollector, dc.MultiSyncDataCollector, dc.MultiaSyncDataCollector]


@USES
@pytest.mark.parametrize("kind", [*KINDS, dc.aSyncDataCollector])
@pytest.mark.usefixtures("_no_gc")
def test_one_that_nobody_refers_to_ends_at_once(
    kind: Any, use: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only when the garbage collector comes, long after a cell of a notebook was run again."""
    monkeypatch.setattr(gc, "freeze", lambda: None)
    collector: Any = loopback_collector(
        "CartPole-v1" if kind is dc.aSyncDataCollector else ["CartPole-v1"],
        Policy(4),
        frames_per_batch=8,
        kind=kind,
        normalize=dc.Normalize(),
        replay_buffer=KeepingBuffer() if use is filling else None,
    )
    workers, closed = workers_of(collector), threading.Event()
    close, workers.close = workers.close, lambda: (close(), closed.set())
    use(collector)
    del collector
    assert closed.wait(30)


@pytest.mark.usefixtures("_no_gc")
def test_a_cell_that_raised_and_is_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What IPython keeps of its error does not keep the collector, once there is another one."""
    monkeypatch.setattr(gc, "freeze", lambda: None)
    options: dict[str, Any] = {"frames_per_batch": 8, "num_workers": 1}
    collector: Any = loopback_collector("CartPole-v1", Policy(4), **options)
    workers, closed = workers_of(collector), threading.Event()
    close, workers.close = workers.close, lambda: (close(), closed.set())
    try:
        collector.next(timeout_s=1e-6)
    except dc.BatchTimeout as error:
        _, *frames = traceback.walk_tb(error.__traceback__)
        assert any("self" in frame.f_locals for frame, _ in frames)  # which IPython looks at
        del frames
        monkeypatch.setattr(sys, "last_value", error, raising=False)
    del collector
    assert not closed.is_set()
    with loopback_collector("CartPole-v1", Policy(4), **options):
        assert closed.wait(30)


class Closable(SamplingEnv):
    """Is closed when the test says so, and tells."""

    may_close = threading.Event()
    closed = threading.Event()

    def close(self) -> None:
        Closable.may_close.wait(60)
        Closable.closed.set()


class Player:
    """Its collector calls a method of it, and so refers back to it."""

    def __init__(self) -> None:
        self.collector = dc.SyncDataCollector(Closable, self.act, frames_per_batch=4)

    def act(self, observation: Any) -> Any:
        return torch.zeros(len(observation), dtype=torch.int64)


def test_an_in_process_collector_that_is_dropped_closes_the_envs_that_it_made() -> None:
    """Garbage may be collected anywhere: nothing is waited for there."""
    Closable.may_close.clear()
    Closable.closed.clear()
    player = Player()
    player.collector.next()
    reference = weakref.ref(player.collector)
    del player
    gc.collect()
    assert reference() is None
    Closable.may_close.set()
    assert Closable.closed.wait(60)


@USES
@pytest.mark.usefixtures("_no_gc")
def test_an_in_process_collector_closes_its_envs_at_once(use: Callable[[Any], None]) -> None:
    Closable.may_close.set()
    collector = dc.SyncDataCollector(
        Closable,
        Policy(3),
        frames_per_batch=4,
        max_frames_per_traj=4,
        replay_buffer=KeepingBuffer() if use is filling else None,
    )
    use(collector)
    Closable.closed.clear()
    del collector
    assert Closable.closed.wait(30)


def test_one_that_fills_a_buffer_and_evaluates_closes_all_envs_too() -> None:
    open_envs = []

    class Listed(SamplingEnv):
        def __init__(self) -> None:
            super().__init__()
            open_envs.append(self)

        def close(self) -> None:
            open_envs.remove(self)

    collector = dc.SyncDataCollector(
        Listed, frames_per_batch=4, max_frames_per_traj=4, replay_buffer=KeepingBuffer()
    )
    collector.start()
    collector.evaluate(1)
    assert len(open_envs) == 2
    del collector
    gc.collect()
    eventually(lambda: not open_envs)


def test_an_env_of_the_users_stays_open() -> None:
    closed = []

    class Mine(SamplingEnv):
        def close(self) -> None:
            closed.append(self)

    env = Mine()
    collector = dc.SyncDataCollector(env, frames_per_batch=4)
    collector.next()
    del collector
    gc.collect()
    forgotten_closings(60)
    assert not closed
    with dc.SyncDataCollector(env, frames_per_batch=4) as collector:
        collector.next()
    assert closed == [env]


def test_envs_whose_close_raises_are_closed_once() -> None:
    closed = []

    class Breaks(SamplingEnv):
        def close(self) -> None:
            closed.append(self)
            raise RuntimeError("broken")

    collector = dc.SyncDataCollector(Breaks, frames_per_batch=4)
    with pytest.raises(dc.EnvError, match=r"close\(\) raised RuntimeError: broken"):
        collector.shutdown()
    reference = weakref.ref(collector)
    del collector
    gc.collect()
    assert reference() is None
    forgotten_closings(60)
    assert len(closed) == 1
