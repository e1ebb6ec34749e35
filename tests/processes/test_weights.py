"""Weights in real workers: each frame shows which weights chose its action."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import pytest
import torch
from helpers.envs import SamplingEnv
from helpers.marked import Marked
from helpers.revealing_policy import Revealing, check_whole

import distcollect as dc

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers can't import test modules


@pytest.fixture(scope="class")
def shared() -> Iterator[tuple[dc.RPCDataCollector, dict[int, float]]]:
    policy = Revealing()
    with dc.RPCDataCollector(
        SamplingEnv, policy, frames_per_batch=20, num_workers=2, envs_per_worker=2, sync=True
    ) as collector:
        yield collector, {0: 0.0}


@pytest.fixture
def collector(shared: tuple[dc.RPCDataCollector, Any]) -> dc.RPCDataCollector:
    return shared[0]


@pytest.fixture
def push(shared: tuple[dc.RPCDataCollector, dict[int, float]]) -> Callable[..., Any]:
    """Pushes weights with one new value; returns the versions that both workers then use."""
    collector, values = shared

    def push(
        wrap: Callable[[Revealing], Any] = lambda module: module, **how: Any
    ) -> tuple[list[int], list[int]]:
        before = collector.policy_version
        value = float(100 + before)
        handle = collector.update_policy_weights_(wrap(Revealing(value=value)), **how)
        assert collector.policy_version == before + 1
        if how.get("wait", True):
            assert handle.done()
            assert set(handle.acknowledged.values()) == {before + 1}
        values[before + 1] = value
        batch = collector.next()
        return check_whole(batch[:2], values), check_whole(batch[2:], values)

    return push


class TestSelection:
    """One sync collector with two workers of two envs each; rows are in order of worker_id."""

    @pytest.mark.parametrize(
        ("worker_ids", "selected"),
        [
            (None, {0, 1}),
            (0, {0}),
            (1, {1}),
            ([1], {1}),
            ((0, 1), {0, 1}),
            ([1, 0], {0, 1}),
            (slice(1, None), {1}),
            (slice(None), {0, 1}),
            (range(2), {0, 1}),
        ],
    )
    def test_only_the_selected_get_them(
        self, collector: Any, push: Any, worker_ids: Any, selected: set[int]
    ) -> None:
        push()
        before = collector.policy_version
        expected = tuple([before + (worker_id in selected)] for worker_id in (0, 1))
        assert push(worker_ids=worker_ids) == expected

    def test_without_waiting(self, collector: Any, push: Any) -> None:
        """In sync mode the next batch still uses them."""
        version = collector.policy_version + 1
        assert push(wait=False) == ([version], [version])

    def test_a_copy_is_taken_at_once(self, collector: Any, shared: Any) -> None:
        module = Revealing(value=50)
        handle = collector.update_policy_weights_(module, wait=False)
        module.fill(51)
        handle.wait(10)
        shared[1][handle.version] = 50
        check_whole(collector.next(), shared[1])

    @pytest.mark.parametrize(
        ("worker_ids", "error", "message"),
        [
            (2, ValueError, r"no worker \[2\].*\[0, 1\]"),
            (-1, ValueError, r"no worker \[-1\]"),
            ([0, 5], ValueError, r"no worker \[5\]"),
            ([0, 0], ValueError, "each worker once"),
            ([], ValueError, "at least one"),
            ("0", TypeError, "int or a list"),
            (True, TypeError, "int or a list"),
        ],
    )
    def test_workers_that_are_not_there(
        self, collector: Any, worker_ids: Any, error: type[Exception], message: str
    ) -> None:
        before = collector.policy_version
        shown = collector.next()["weights"]
        with pytest.raises(error, match=message):
            collector.update_policy_weights_(Revealing(), worker_ids=worker_ids)
        assert collector.policy_version == before
        assert torch.equal(collector.next()["weights"], shown)


def test_no_action_is_chosen_with_torn_weights(marked: Marked) -> None:
    """Pushes at full rate to varying workers that collect ahead; 4 MB between two scalars.

    Versions may change within a rollout, but never go back in a worker.
    """
    policy = Revealing(size=1_000_000)
    with dc.RPCDataCollector(
        SamplingEnv, policy, frames_per_batch=50, num_workers=2, sync=False
    ) as collector:
        newest = {0: 0, 1: 0}
        changed_within = 0
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline or not changed_within:
            version = collector.policy_version + 1
            policy.fill(version)
            worker_ids = [None, 0, 1, [1, 0]][version % 4]
            handle = collector.update_policy_weights_(
                policy, worker_ids=worker_ids, wait=version % 3 == 0
            )
            if handle is not None and version % 5 == 0:
                handle.wait(20)
            batch = collector.next()
            versions = check_whole(batch)
            stamps = batch["collector", "policy_version"]
            assert (stamps.diff(dim=-1) >= 0).all()
            worker_id = int(batch["collector", "worker_id"].flatten()[0])
            assert newest[worker_id] <= versions[0]
            newest[worker_id] = versions[-1]
            changed_within += len(versions) > 1
            assert time.monotonic() < deadline + 30
        collector.update_policy_weights_(policy.fill(collector.policy_version + 1))
        final = collector.policy_version
        seen: set[int] = set()
        while len(seen) < 2:  # rollouts collected ahead come first
            batch = collector.next()
            if check_whole(batch) == [final]:
                seen.add(int(batch["collector", "worker_id"].flatten()[0]))
            assert time.monotonic() < deadline + 40
    assert marked.gone(5), marked.left()
