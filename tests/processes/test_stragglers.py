"""In sync mode nobody waits for the slowest for ever: what it has is delivered, the rest padded."""

from __future__ import annotations

import sys
import time
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

import distcollect as dc

cloudpickle.register_pickle_by_value(sys.modules[__name__])


T = 20


class Counting(gym.Env[np.ndarray, np.int64]):
    """Observes its steps; one worker's takes a hundred times as long."""

    observation_space = spaces.Box(0, np.inf, (1,), np.float64)
    action_space = spaces.Discrete(2)

    def __init__(self, pause_s: float) -> None:
        self.pause_s = pause_s

    def reset(self, **_: Any) -> tuple[np.ndarray, dict[str, Any]]:
        self.steps = 0
        return np.zeros(1), {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        time.sleep(self.pause_s)
        return np.full(1, self.steps, np.float64), 1.0, False, False, {}


def make(context: dc.EnvContext) -> Counting:
    return Counting(0.2 if context.worker_id == 2 else 0.002)


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
            # Its trajectory goes on in the next batch where it ended in this one.
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
