"""In sync mode the slowest worker delivers the frames it has; the rest is padding."""

from __future__ import annotations

import sys
import time

import cloudpickle
import pytest
from helpers.envs import StepCountEnv

import distcollect as dc

cloudpickle.register_pickle_by_value(sys.modules[__name__])


T = 20


def make(context: dc.EnvContext) -> StepCountEnv:
    return StepCountEnv(0.2 if context.worker_id == 2 else 0.002)


@pytest.mark.parametrize("how", [{"preemptive_threshold": 0.6}, {"batch_deadline_s": 0.5}])
def test_the_slowest_delivers_what_it_has(how: dict[str, float]) -> None:
    with dc.RPCDataCollector(
        make, num_workers=3, frames_per_batch=3 * T, sync=True, **how
    ) as collector:
        real = 0
        steps = 0
        for _ in range(4):
            begin = time.monotonic()
            batch = collector.next()
            assert time.monotonic() - begin < 0.2 * T / 2
            assert batch.shape == (3, T)
            mask = batch["collector", "mask"]
            assert mask[:2].all()
            count = int(mask[2].sum())
            assert 1 <= count < T
            assert mask[2, :count].all()
            # Its trajectory continues in the next batch.
            mine = batch["observation"][2, :count, 0].tolist()
            assert mine == list(range(steps, steps + count))
            steps += count
            assert batch["next", "observation"][2, count - 1] == steps
            real += int(mask.sum())
        slow, fast = collector.worker_paces[2], collector.worker_paces[0]
        assert (slow.num_rollouts, slow.num_preempted) == (4, 4)
        assert fast.num_preempted == 0
        assert slow.mean_s > 2 * fast.mean_s
    report = collector.ledger
    assert report.total.delivered == real
    assert report.total.open == 0
