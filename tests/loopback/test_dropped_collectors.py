"""A collector that is dropped without shutdown() ends its workers."""

from __future__ import annotations

import gc
import threading
import weakref
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
