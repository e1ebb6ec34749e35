"""A replay buffer that worker processes fill in the background."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from helpers.replay_buffers import (
    Buffer,
    T,
    check_failure_of_what_collects_is_told,
    check_weights_while_the_buffer_fills,
)
from helpers.waiting import eventually

import distcollect as dc


@pytest.mark.parametrize("how", ["dies", "raises"])
@pytest.mark.parametrize("kind", [dc.aSyncDataCollector])
def test_failure_of_what_collects_is_told(kind: Any, how: str) -> None:
    check_failure_of_what_collects_is_told(kind, how)


def test_one_that_is_dropped_ends() -> None:
    """A collector ends with its last reference; then another one can be made."""
    for _ in range(2):
        buffer = Buffer()
        collector = dc.aSyncDataCollector("CartPole-v1", frames_per_batch=T, replay_buffer=buffer)
        collector.start()
        eventually(lambda: len(buffer))  # noqa: B023 - called at once
        del collector
        eventually(lambda: "distcollect-collect" not in {t.name for t in threading.enumerate()})


@pytest.mark.parametrize("kind", [dc.MultiaSyncDataCollector])
def test_weights_while_the_buffer_fills(kind: Any) -> None:
    check_weights_while_the_buffer_fills(kind)
