"""Asynchronous collection that gives the same batches each time."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.loopback_pool import loopback_collector
from helpers.reproducing import Learned, N, T, Uneven, check_same_batches

import distcollect as dc


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("make", [loopback_collector])
def test_same_batches(make: Any, wait: bool) -> None:
    check_same_batches(make, wait)


def test_all_else_goes_on() -> None:
    """Ends where it should; calls and the evaluation disturb nothing."""
    with loopback_collector(
        Uneven,
        Learned(),
        frames_per_batch=N * T,
        envs_per_worker=N,
        num_workers=2,
        total_frames=5 * N * T,
        reproducible=True,
    ) as collector:
        workers = []
        for batch in collector:
            workers.append(int(batch["collector", "worker_id"][0, 0]))
            collector.call("spec")
        assert workers == [0, 1, 0, 1, 0]


def test_a_bound_on_staleness_makes_no_sense() -> None:
    with pytest.raises(ValueError, match=r"reproducible=True and Staleness.*lag is fixed"):
        dc.RPCDataCollector(
            Uneven, frames_per_batch=T, reproducible=True, staleness=dc.Staleness(1)
        )
