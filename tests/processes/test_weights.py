"""Weights in worker processes: each frame tells which weights chose its action."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.descendants import links_of
from helpers.marked import Marked
from helpers.publishing import NAMES, Telling, telling_workers
from helpers.waiting import eventually
from tensordict import TensorDict

import distcollect as dc


def versions_of(batch: TensorDict) -> list[list[int]]:
    """The versions in each row; the weights of a version have its number as their value."""
    versions = batch["collector", "policy_version"]
    for name in NAMES:
        assert torch.equal(batch[name], versions.double()), name
    return [row.unique_consecutive().tolist() for row in versions]


@pytest.fixture(scope="module")
def collector() -> Iterator[dc.RPCDataCollector]:
    """In sync mode, with two workers of one env each."""
    with telling_workers(Telling(), 2) as collector:
        yield collector


@pytest.mark.parametrize(
    ("worker_ids", "selected"),
    [
        (None, [0, 1]),
        (0, [0]),
        (1, [1]),
        ([1], [1]),
        ((0, 1), [0, 1]),
        ([1, 0], [0, 1]),
        (slice(1, None), [1]),
        (slice(None), [0, 1]),
        (range(2), [0, 1]),
    ],
)
def test_only_the_selected_get_them(
    collector: dc.RPCDataCollector, worker_ids: Any, selected: list[int]
) -> None:
    """In sync mode the next batch uses them, also without waiting; a copy is taken at once."""
    version = collector.policy_version + 1
    collector.update_policy_weights_(Telling(version))
    assert versions_of(collector.next()) == [[version]] * 2
    policy = Telling(version + 1)
    handle = collector.update_policy_weights_(policy, worker_ids=worker_ids, wait=False)
    policy.fill(-1)
    assert versions_of(collector.next()) == [[version + (w in selected)] for w in (0, 1)]
    handle.wait(10)
    assert handle.done()
    assert handle.acknowledged == dict.fromkeys(selected, version + 1)
    assert (handle.version, handle.worker_ids) == (version + 1, tuple(selected))


def test_no_action_is_chosen_with_torn_weights(marked: Marked) -> None:
    """Pushes at full rate to varying workers that collect ahead; 8 MB before other weights.

    Versions may change within a rollout, but never go back in a worker.
    """
    policy = Telling(num_floats=1_000_000)
    with dc.RPCDataCollector(
        "CartPole-v1", policy, frames_per_batch=50, num_workers=2, sync=False
    ) as collector:
        newest = {0: 0, 1: 0}
        changed_within = 0
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline or not changed_within:
            version = collector.policy_version + 1
            handle = collector.update_policy_weights_(
                policy.fill(version),
                worker_ids=[None, 0, 1, [1, 0]][version % 4],
                wait=version % 3 == 0,
            )
            if handle is not None and version % 5 == 0:
                handle.wait(20)
            batch = collector.next()
            [versions] = versions_of(batch)
            assert versions == sorted(versions)
            worker_id = int(batch["collector", "worker_id"][0, 0])
            assert newest[worker_id] <= versions[0]
            newest[worker_id] = versions[-1]
            changed_within += len(versions) > 1
            assert time.monotonic() < deadline + 30
        final = collector.policy_version + 1
        collector.update_policy_weights_(policy.fill(final))
        while min(newest.values()) < final:  # rollouts collected ahead come first
            batch = collector.next()
            newest[int(batch["collector", "worker_id"][0, 0])] = versions_of(batch)[0][-1]
            assert time.monotonic() < deadline + 40
    assert marked.gone(5), marked.left()


def test_nothing_is_left_of_a_push_that_a_shutdown_meets() -> None:
    def memories() -> list[str]:
        return [link for link in links_of("self") if "memfd:distcollect" in link]

    def push(collector: dc.RPCDataCollector, done: threading.Event) -> None:
        with contextlib.suppress(dc.DistCollectError):
            while not done.is_set():
                collector.update_policy_weights_(Telling(), wait=False)

    before = len(memories())
    for _ in range(5):
        collector, done = telling_workers(Telling(), 1), threading.Event()
        pusher = threading.Thread(target=push, args=(collector, done))
        pusher.start()
        collector.next()
        collector.shutdown()
        done.set()
        pusher.join(20)
    eventually(lambda: len(memories()) <= before, 20, memories)
