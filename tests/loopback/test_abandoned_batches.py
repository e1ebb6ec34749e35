"""After a timeout or Ctrl-C in sync mode, workers do not finish the batch that nobody gets."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers.envs import Counting
from helpers.loopback_pool import loopback_collector, workers_of
from helpers.waiting import eventually

import distcollect as dc

T, BEFORE, WORKERS = 50, 6, 2


class Gated(Counting):
    """Each step, of whichever env, waits for a permit."""

    permits = threading.Semaphore(0)

    def step(self, action: Any) -> Any:
        Gated.permits.acquire()
        return super().step(action)


class Slow(Counting):
    def step(self, action: Any) -> Any:
        time.sleep(0.002)
        return super().step(action)


@pytest.mark.parametrize("error", [dc.BatchTimeout, KeyboardInterrupt])
def test_an_abandoned_batch_ends_at_the_next_step(error: type[BaseException]) -> None:
    Gated.permits = threading.Semaphore(0)
    with loopback_collector(
        Gated, sync=True, num_workers=WORKERS, frames_per_batch=WORKERS * T
    ) as collector:
        Gated.permits.release(BEFORE)
        if error is KeyboardInterrupt:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        transport, calls = workers_of(collector).transport, []
        call = transport.call
        with (
            patch.object(
                transport, "call", lambda *args: calls.append(args[1].__name__) or call(*args)
            ),
            pytest.raises(error),
        ):
            collector.next(timeout_s=0.5 if error is dc.BatchTimeout else 60)
        # Where they are is asked while they still are there.
        places = ["place"] * WORKERS if error is dc.BatchTimeout else []
        assert calls[WORKERS:] == [*places, *["preempt"] * WORKERS]
        Gated.permits.release(WORKERS)  # for the steps that they are in
        eventually(lambda: len(collector.ledger.workers) == WORKERS, 10)
        total = collector.ledger.total
        num_lost = total.stepped
        assert WORKERS <= num_lost <= BEFORE + WORKERS
        assert (total.lost, total.open) == ({"given_up": num_lost}, 0)
        Gated.permits.release(1000)
        batch = collector.next(timeout_s=60)
        total = collector.ledger.total
        assert (total.stepped, total.delivered) == (num_lost + WORKERS * T, WORKERS * T)
        assert total.lost == {"given_up": num_lost}
        # The envs go on where they were: no frame comes twice, and none is missing.
        steps = batch["next", "observation"].reshape(WORKERS, T)
        assert (steps.diff(dim=1) == 1).all()
        assert int(steps[:, 0].sum()) == num_lost + WORKERS


@pytest.mark.parametrize("trajs_per_batch", [1, 3])
def test_whole_trajectories_have_no_gap(trajs_per_batch: int) -> None:
    num_abandoned, batches = 0, []
    with loopback_collector(
        Slow, sync=True, num_workers=2, frames_per_batch=20, trajs_per_batch=trajs_per_batch
    ) as collector:
        for number in range(40):
            try:
                batches.append(collector.next(timeout_s=60 if number % 2 else 0.006))
            except dc.BatchTimeout:
                num_abandoned += 1
    assert num_abandoned
    for batch in batches:
        assert batch["collector", "mask"].sum(-1).tolist() == [7] * trajs_per_batch
        assert (batch["next", "observation"].squeeze(-1).diff(dim=-1) == 1).all()
        assert len(batch["collector", "traj_ids"].unique()) == trajs_per_batch
    steps = torch.cat([batch["next", "observation"].flatten() for batch in batches])
    worker = torch.cat([batch["collector", "worker_id"].flatten() for batch in batches])
    seen = [*zip(steps.tolist(), worker.tolist(), strict=True)]
    assert len({*seen}) == len(seen)
