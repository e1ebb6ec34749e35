"""The pool's work for a rollout, with workers that answer at once."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import pytest
from helpers.pool_simulation import FRAMES, taken

from distcollect.config import Staleness
from distcollect.pool.pool import Pool
from distcollect.pool.worker_slots import BatchPlan
from distcollect.rollout.header import Header
from distcollect.transport.protocol import CollectRequest, Deliver


class Offer:
    """A rollout that arrives before the call that fetches it returns."""

    def __init__(self, header: Header) -> None:
        self.header = header

    def fetch(self, deliver: Deliver) -> None:
        deliver([], None)

    def decline(self) -> None: ...


class Workers:
    """The transport to the workers, and the sender of their weights."""

    on_acknowledged: Any = None
    on_left_out: Any = None

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()

    def collect(self, peer: int, request: CollectRequest, deliver: Deliver) -> None:
        sequence = self.counts[peer]
        self.counts[peer] += 1
        stepped = self.counts[peer] * FRAMES
        header = Header(peer, 0, sequence, FRAMES, FRAMES, 0, (0, 0), stepped=stepped)
        deliver(Offer(header), None)

    def acknowledged(self, worker_id: int) -> int:
        return 0

    def welcome(self, worker_id: int, peer: int) -> int:
        return 0

    def expect_nobody(self) -> None: ...


def make(*, sync: bool, num_workers: int, staleness: Staleness | None = None) -> Pool:
    workers: Any = Workers()
    plan = BatchPlan(sync=sync, num_rollouts=num_workers, num_envs=1, num_steps=FRAMES)
    pool = Pool(workers, workers, plan, failure_sink=workers, staleness=staleness)
    for worker_id in range(num_workers):
        pool.join(worker_id, 0, worker_id)
    return pool


def test_answers_that_come_at_once_do_not_nest() -> None:
    num_workers = 3000
    pool = make(sync=True, num_workers=num_workers)
    for _ in range(2):
        rollouts = taken(pool, 60)
        assert [r.header.worker_id for r in rollouts] == list(range(num_workers))


@pytest.mark.parametrize("staleness", [None, Staleness(0), Staleness(2, mode="drop")])
@pytest.mark.parametrize("sync", [True, False])
def test_the_work_for_a_rollout_does_not_grow_with_the_workers(
    sync: bool, staleness: Staleness | None
) -> None:
    def num_calls(num_workers: int) -> float:
        """Calls of functions for each rollout."""
        pool = make(sync=sync, num_workers=num_workers, staleness=staleness)
        num_batches = 3 if sync else 300
        for _ in range(num_batches):
            taken(pool, 5)
        calls = 0

        def count(*_: Any) -> None:
            nonlocal calls
            calls += 1

        sys.setprofile(count)
        try:
            for _ in range(num_batches):
                taken(pool, 5)
        finally:
            sys.setprofile(None)
        return calls / num_batches / (num_workers if sync else 1)

    assert num_calls(400) < 1.2 * num_calls(20)
