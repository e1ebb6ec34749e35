"""Weights may be swapped in between rollouts only, and may have to be of one certain version."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import Future
from typing import Any

import cloudpickle
import gymnasium as gym
from helpers.engines import Told, offer
from helpers.loopback_pool import new_worker
from helpers.publishing import Collect, Telling, collect

import distcollect as dc
from distcollect.common.threads import do_jobs
from distcollect.engine.pickled_plan import TensorTable
from distcollect.engine.plan import WorkerPlan
from distcollect.transport.protocol import CollectRequest

__all__ = ["collect"]

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers can't import test modules


def test_swaps_between_rollouts_only(collect: Collect) -> None:
    policy = Telling()
    collector = collect(
        policy,
        sync=False,
        num_workers=2,
        weight_sync=dc.WeightSync(swap_within_rollouts=False),
    )
    collector.next()
    done = threading.Event()

    def publish() -> None:
        version = 0
        while not done.is_set():
            version += 1
            collector.update_policy_weights_(Telling(version))

    publisher = threading.Thread(target=publish)
    publisher.start()
    try:
        for _ in range(300):
            versions = collector.next()["collector", "policy_version"]
            assert (versions == versions[0, 0]).all()
    finally:
        done.set()
        publisher.join(20)
    assert collector.policy_version > 3


def cart_pole() -> gym.Env[Any, Any]:
    return gym.make("CartPole-v1")


def test_a_rollout_has_the_version_that_was_asked_for_whatever_comes_before_it_begins() -> None:
    worker = new_worker()

    def done(answer: Future[Any]) -> Any:
        worker._jobs.put(None)
        do_jobs(worker._jobs)
        return answer.result(0)

    plan = WorkerPlan(cart_pole, 1, Told(), swap_within_rollouts=False, exact_version=True)
    for part in TensorTable([]).pickled(plan):
        worker.receive_part(part)
    done(worker.configure())
    offer(worker._configured.engine.weights, 3)
    answer = worker.collect(CollectRequest(5, version=3))
    for version in range(4, 40):
        offer(worker._configured.engine.weights, version)
    header, _ = done(answer)
    assert header.policy_version == (3, 3)
    worker.stop()
    worker.run()
