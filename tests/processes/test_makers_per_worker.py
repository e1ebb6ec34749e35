"""A list of env makers gives the number of workers."""

from __future__ import annotations

import distcollect as dc

T = 5


def test_makers_in_a_list_say_how_many_workers() -> None:
    with dc.MultiSyncDataCollector(["CartPole-v1"] * 2, frames_per_batch=2 * T) as collector:
        assert collector.num_workers == 2
        assert collector.next().shape == (2, T)
