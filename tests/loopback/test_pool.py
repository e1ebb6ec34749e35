"""The pool's work for a rollout, with workers that answer at once."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from benchmarks.scale import SimulatedRun

from distcollect.config import Staleness


def test_answers_that_come_at_once_do_not_nest() -> None:
    num_workers = 3000
    run = SimulatedRun(num_workers, sync=True, has_threads=False)
    for _ in range(2):
        batch = run.pool.get(60)
        assert [request.worker_id for request in batch] == [*range(num_workers)]
        run.pool.delivered(batch, ())
    run.close()


@pytest.mark.parametrize("staleness", [None, Staleness(0), Staleness(2, mode="drop")])
@pytest.mark.parametrize("sync", [True, False])
def test_the_work_for_a_rollout_does_not_grow_with_the_workers(
    sync: bool, staleness: Staleness | None
) -> None:
    def num_calls(num_workers: int) -> float:
        """Calls of functions for each rollout."""
        run = SimulatedRun(num_workers, sync=sync, staleness=staleness, has_threads=False)
        num_batches = 3 if sync else 300
        run.collect(num_batches)
        calls = 0

        def count(*_: Any) -> None:
            nonlocal calls
            calls += 1

        sys.setprofile(count)
        try:
            run.collect(num_batches)
        finally:
            sys.setprofile(None)
        run.close()
        return calls / num_batches / (num_workers if sync else 1)

    assert num_calls(400) < 1.2 * num_calls(20)
