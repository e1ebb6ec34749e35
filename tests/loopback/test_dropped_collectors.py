"""A collector that is dropped without shutdown() ends its workers."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
from helpers.loopback_pool import loopback_collector
from tensordict import TensorDict

import distcollect as dc


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
    workers: Any = trainer.collector._session.workers
    closed = []
    close, workers.close = workers.close, lambda: (closed.append(True), close())
    del trainer
    gc.collect()
    assert collector() is None
    assert closed


def test_async_shutdown_calls_the_shutdown_of_a_subclass() -> None:
    calls = []

    class Mine(dc.SyncDataCollector):
        def shutdown(self) -> None:
            calls.append("shutdown")
            super().shutdown()

    class Buffer:
        def extend(self, data: TensorDict) -> None:
            """Drops the frames."""

    collector = Mine("CartPole-v1", frames_per_batch=8, total_frames=80, replay_buffer=Buffer())
    collector.start()
    collector.async_shutdown(timeout=20)
    assert calls == ["shutdown"]


def test_a_start_that_fails_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    class Buffer:
        def extend(self, data: TensorDict) -> None:
            """Drops the frames."""

    def fail(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    with dc.SyncDataCollector(
        "CartPole-v1", frames_per_batch=8, total_frames=80, replay_buffer=Buffer()
    ) as collector:
        with monkeypatch.context() as patch:
            patch.setattr("distcollect.collectors.stream.Background", fail)
            with pytest.raises(RuntimeError, match="new thread"):
                collector.start()
        collector.start()
        collector.async_shutdown(timeout=20)
