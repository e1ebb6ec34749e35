"""What a collector whose workers are threads says bounds it."""

from __future__ import annotations

import pytest
from helpers.bottlenecks import Env, Policy, collect
from helpers.loopback_pool import loopback_collector


def test_bound_by_the_envs_of_a_worker() -> None:
    # They sleep: one that spins would keep the interpreter, which is the trainer's as well here.
    collector = loopback_collector(
        lambda: Env(sleep_s=0.003), Policy(), frames_per_batch=30, num_workers=1
    )
    assert collect(collector, num_batches=6) == "env"


@pytest.mark.parametrize("sync", [True, False])
def test_bound_by_the_trainer(sync: bool) -> None:
    collector = loopback_collector(Env, Policy(), frames_per_batch=20, num_workers=1, sync=sync)
    assert collect(collector, num_batches=5, train_s=0.2) == "trainer"
