"""What is published to which workers, how it travels, and under which number."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from helpers import waiting
from helpers.bad_calls import Extends
from helpers.churning_workers import churning_collector
from helpers.envs import ProcessIdEnv
from helpers.loopback_pool import loopback_collector, workers_of
from helpers.publishing import NAMES, Collect, Telling, collect, told

import distcollect as dc

__all__ = ["collect"]

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers can't import test modules


class TestWhatTravels:
    @pytest.mark.parametrize(
        ("wire_dtype", "rounded"), [("bfloat16", 1.0), ("float16", 1.0009765625)]
    )
    def test_narrow_floats(self, collect: Collect, wire_dtype: str, rounded: float) -> None:
        full = collect().update_policy_weights_().num_bytes
        collector = collect(weight_sync=dc.WeightSync(wire_dtype=wire_dtype))
        policy = Telling().fill(1.001)
        policy.count.fill_(1001)
        handle = collector.update_policy_weights_(policy)
        batch = collector.next()
        assert {told(batch)[name] for name in NAMES if name != "count"} == {rounded}
        assert told(batch)["count"] == 1001
        assert batch["wide"].dtype == torch.float64
        assert handle.num_bytes < full / 2

    def test_a_value_too_large_for_float16_is_refused(self, collect: Collect) -> None:
        collector = collect(weight_sync=dc.WeightSync(wire_dtype="float16"))
        policy = Telling()
        policy.body.weight.data[2, 1] = -70_000
        with pytest.raises(dc.WeightsError, match=r"'body.weight' .* 70000, .*'bfloat16'"):
            collector.update_policy_weights_(policy)
        assert collector.policy_version == 0

    def test_what_is_not_finite_is_sent_as_it_is(self, collect: Collect) -> None:
        policy = Telling()
        policy.critic.bias.data[0] = float("nan")
        collector = collect()
        collector.update_policy_weights_(policy)
        assert np.isnan(told(collector.next())["critic_bias"])

    @pytest.mark.parametrize("wire_dtype", [None, "bfloat16"])
    def test_only_what_changed(self, collect: Collect, wire_dtype: str | None) -> None:
        options = dc.WeightSync(changes_only=True, wire_dtype=wire_dtype)
        collector = collect(weight_sync=options)
        policy = Telling()
        full = collector.update_policy_weights_(policy.fill(1)).num_bytes
        policy.body.bias.data.fill_(2)
        assert 0 < collector.update_policy_weights_(policy).num_bytes < full / 10
        assert told(collector.next()) == {**dict.fromkeys(NAMES, 1.0), "body_bias": 2.0}
        assert collector.update_policy_weights_(policy).num_bytes == 0
        assert collector.policy_version == 3
        assert (collector.next()["collector", "policy_version"] == 3).all()

    @pytest.mark.skipif(torch.cuda.is_available(), reason="this host has a GPU")
    def test_a_device_that_this_process_lacks(self, collect: Collect) -> None:
        with pytest.raises(dc.ArgumentError, match=r"no such device .*workers by their ids"):
            collect().update_policy_weights_(worker_ids=torch.device("cuda"))

    def test_who_missed_a_version_gets_all_of_it(self, collect: Collect) -> None:
        collector = collect(weight_sync=dc.WeightSync(changes_only=True))
        policy = Telling()
        collector.update_policy_weights_(policy.fill(1))
        policy.body.bias.data.fill_(2)
        collector.update_policy_weights_(policy, worker_ids=0)
        policy.wide.data.fill_(3)
        collector.update_policy_weights_(policy)
        batch = collector.next()
        expected = {**dict.fromkeys(NAMES, 1.0), "body_bias": 2.0, "wide": 3.0}
        assert [told(batch, row) for row in (0, 1)] == [expected, expected]

    def test_what_is_excluded_stays(self, collect: Collect) -> None:
        collector = collect(weight_sync=dc.WeightSync(exclude=["critic.*", "count"]))
        collector.update_policy_weights_(Telling(5))
        kept = {"critic_weight": 0.0, "critic_bias": 0.0, "count": 0.0}
        assert told(collector.next()) == {**dict.fromkeys(NAMES, 5.0), **kept}
        state = Telling(6).state_dict()
        del state["critic.weight"]
        collector.update_policy_weights_(state)
        assert told(collector.next())["wide"] == 6


class Noting(dc.AutoUpdater):
    """Notes for each worker how many versions had been published when it got its last one."""

    def __init__(self) -> None:
        super().__init__()
        self.newest: Counter[int] = Counter()

    def _skip_update(self, worker_id: int) -> bool:
        self.newest[worker_id] = self.collector.policy_version + 1
        return False


@pytest.mark.parametrize(("lag", "num_workers"), [(0, 2), (2, 4), (4, 4)])
def test_a_bound_on_staleness_gives_each_worker_its_share(
    collect: Collect, lag: int, num_workers: int
) -> None:
    """Also those whose weights always arrive last."""
    options = {"sync": False, "num_workers": num_workers, "staleness": dc.Staleness(lag)}
    collector, policy, counts = collect(**options), Telling(), Counter[int]()
    for _ in range(10 * num_workers):
        counts[int(collector.next()["collector", "worker_id"][0, 0])] += 1
        collector.update_policy_weights_(policy)
    assert sorted(counts) == [*range(num_workers)]
    assert min(counts.values()) >= 5, counts


class TestToWhom:
    def test_the_workers_of_the_last_batch(self, collect: Collect) -> None:
        collector = collect(sync=False, num_workers=3)
        with pytest.raises(ValueError, match="no batch was taken yet"):
            collector.update_policy_weights_(worker_ids="last_batch")
        for _ in range(5):
            last = int(collector.next()["collector", "worker_id"][0, 0])
            handle = collector.update_policy_weights_(worker_ids="last_batch")
            assert handle.worker_ids == (last,)

    def test_those_who_lag(self, collect: Collect) -> None:
        collector = collect(max_weight_update_interval=2)
        assert collector.update_policy_weights_(worker_ids="lagging") is None
        collector.update_policy_weights_(worker_ids=0)
        collector.update_policy_weights_(worker_ids=0)
        assert collector.update_policy_weights_(worker_ids="lagging").worker_ids == (1,)
        assert collector.policy_version == 3
        assert collector.update_policy_weights_(worker_ids="all").worker_ids == (0, 1)

    @pytest.mark.parametrize(
        ("worker_ids", "error", "message"),
        [
            ("lagging", ValueError, "max_weight_update_interval"),
            ("nobody", TypeError, "'all', 'last_batch' or 'lagging'"),
            (2, ValueError, r"no worker \[2\].*\[0, 1\]"),
            (-1, ValueError, r"no worker \[-1\]"),
            ([0, 5], ValueError, r"no worker \[5\]"),
            ([0, 0], ValueError, "each worker once"),
            ([], ValueError, "at least one"),
            (True, TypeError, "int or a list"),
        ],
    )
    def test_workers_that_are_not_there(
        self, collect: Collect, worker_ids: Any, error: type[Exception], message: str
    ) -> None:
        collector = collect()
        with pytest.raises(error, match=message):
            collector.update_policy_weights_(worker_ids=worker_ids)
        assert collector.policy_version == 0

    @pytest.mark.parametrize(
        ("second", "error", "message"),
        [
            ({7: Telling(2)}, ValueError, r"no worker \[7\]"),
            ({1: {"wide": torch.zeros(7)}}, dc.WeightsError, "wide"),
        ],
    )
    def test_to_each_its_own_or_nothing_to_anyone(
        self, collect: Collect, second: Any, error: type[Exception], message: str
    ) -> None:
        collector = collect()
        with pytest.raises(error, match=message):
            collector.update_policy_weights_({0: Telling(1), **second})
        with pytest.raises(ValueError, match="leave worker_ids out"):
            collector.update_policy_weights_({0: Telling(1), 1: Telling(2)}, worker_ids=0)
        assert collector.policy_version == 0
        assert collector.update_policy_weights_({0: Telling(3), 1: Telling(4)}).worker_ids == (1,)
        batch = collector.next()
        assert [told(batch, row)["wide"] for row in (0, 1)] == [3, 4]
        assert batch["collector", "policy_version"][:, 0].tolist() == [1, 2]

    @pytest.mark.parametrize("sync", [True, False])
    def test_by_itself(self, collect: Collect, sync: bool) -> None:
        policy = Telling()
        updater = Noting()
        collector = collect(policy, sync=sync, update_at_each_batch=True, weight_updater=updater)
        batch = collector.next()
        assert told(batch)["wide"] == 0
        policy.fill(1)
        collector.next()
        assert collector.policy_version == 1
        assert updater.newest == dict.fromkeys(batch["collector", "worker_id"][:, 0].tolist(), 1)
        waiting.eventually(lambda: told(collector.next())["wide"] == 1, 20)

    def test_not_by_itself_in_the_background(self, collect: Collect) -> None:
        """There it would copy weights that an optimiser is changing."""
        collector = collect(update_at_each_batch=True, replay_buffer=Extends())
        with pytest.raises(dc.ArgumentError, match=r"update_at_each_batch.* update_policy_wei"):
            collector.start()
        collector.next()

    def test_by_itself_also_to_those_who_lag(self) -> None:
        """One worker is so slow that it delivers no batch during the test."""

        class Slow(ProcessIdEnv):
            def step(self, action: Any) -> Any:
                waiting.test_is_over.wait(30)
                return super().step(action)

        def first_step_is_quick(context: Any) -> Any:
            return Slow() if context.worker_id == 2 else ProcessIdEnv()

        waiting.test_is_over.clear()
        collector = loopback_collector(
            first_step_is_quick,
            Telling(),
            num_workers=3,
            frames_per_batch=4,
            sync=False,
            update_at_each_batch=True,
            max_weight_update_interval=4,
            weight_updater=(updater := Noting()),
        )
        try:
            for _ in range(30):
                collector.next()
                newest = [updater.newest[worker_id] for worker_id in range(3)]
                assert collector.policy_version - min(newest) <= 5
            assert newest[2] > 0
        finally:
            waiting.test_is_over.set()
            collector.shutdown()


class TestWhoHasLeft:
    """Nothing is published to a worker that has left, or was lost for good."""

    def test_who_gave_the_last_batch(self) -> None:
        with churning_collector(
            ProcessIdEnv, Telling(), num_workers=2, frames_per_batch=4, sync=False
        ) as collector:
            last = collector.next(timeout_s=20)
            lose(collector, int(last["collector", "worker_id"][0, 0]))
            assert collector.update_policy_weights_(worker_ids="last_batch") is None
            assert collector.policy_version == 0

    def test_who_took_the_share_of_another(self) -> None:
        with churning_collector(
            ProcessIdEnv, Telling(), num_workers=2, frames_per_batch=8, sync=True
        ) as collector:
            lose(collector, 1)
            assert (collector.next()["collector", "worker_id"] == 0).all()
            handle = collector.update_policy_weights_(worker_ids="last_batch")
            assert handle.worker_ids == (0,)
            assert handle.acknowledged == {0: 1}


class TestWhoTakesTheSlotOfAnother:
    """That one is gone for good; it had weights of its own."""

    def test_newer_weights_for_all(self) -> None:
        with churning_collector(
            ProcessIdEnv, Telling(), num_workers=2, frames_per_batch=8, sync=True
        ) as collector:
            collector.update_policy_weights_({1: Telling(5)})
            lose(collector, 1)
            collector.update_policy_weights_(Telling(6))
            assert told_by_one_more(collector) == [6, 6]
            assert (collector.next()["collector", "policy_version"] == 2).all()

    @pytest.mark.parametrize(("given_to", "has"), [(1, 5), (0, 0)])
    def test_its_weights_if_there_are_no_newer_ones_for_all(self, given_to: int, has: int) -> None:
        """Else the first ones. Also what these normalise by, which no other worker has any more."""
        options = {"normalize": dc.Normalize(), "frames_per_batch": 8, "sync": True}
        with churning_collector(ProcessIdEnv, Telling(), num_workers=2, **options) as collector:
            collector.update_policy_weights_({given_to: Telling(5)})
            lose(collector, 1)
            for value in (6, 7):
                collector.update_policy_weights_({0: Telling(value)})
                collector.next(timeout_s=20)
            assert told_by_one_more(collector) == [7, has]


def told_by_one_more(collector: dc.RPCDataCollector) -> list[float]:
    """What both workers have, once one takes the slot of the second."""
    workers = workers_of(collector)
    workers.grow(1)
    workers.settle()
    batch = collector.next(timeout_s=20)
    assert batch["collector", "worker_id"][:, 0].tolist() == [0, 1]
    return [told(batch, row)["wide"] for row in (0, 1)]


def lose(collector: dc.RPCDataCollector, worker_id: int) -> None:
    """Have a worker die that is not replaced."""
    workers = workers_of(collector)
    workers.kill(worker_id, replaced=False)
    waiting.eventually(lambda: worker_id not in workers.observer.worker_ids)


# A state that is loaded after a publication numbers what workers have, and what comes later.

LOADED = 100


class HeldUp(dc.TransportUpdater):
    """Sends nothing before it may."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.may_go_on = threading.Event(), threading.Event()

    def sources(
        self, payload: torch.Tensor, peers: Mapping[int, int]
    ) -> Mapping[int, dc.WeightSource]:
        self.begun.set()
        assert self.may_go_on.wait(20)
        return super().sources(payload, peers)


@pytest.mark.parametrize("own", [True, False])
def test_weights_for_one_worker_never_go_to_another(collect: Collect, own: bool) -> None:
    """Of the collector's own policy, which is one for all, a worker may get a newer version."""
    policy, updater = Telling(), HeldUp()
    collector = collect(policy, num_workers=12, weight_updater=updater)
    for each in range(12):
        weights = policy.fill(each + 1) if own else Telling(each + 1).state_dict()
        collector.update_policy_weights_(weights, worker_ids=each, wait=False)
    updater.may_go_on.set()
    batch = collector.next()
    versions = batch["collector", "policy_version"][:, -1]
    assert torch.equal(batch["wide"][:, -1].long(), versions)
    assert (versions.tolist() == list(range(1, 13))) != own


@pytest.mark.parametrize("mode", ["pace", "drop", "mask"])
def test_the_age_counts_versions_that_were_sent_to_others(collect: Collect, mode: str) -> None:
    """Worker 1 is left out of 40 publications: its frames have no lag, but are too old."""
    bound = dc.Staleness(max_policy_age=2, mode=mode)
    collector = collect(sync=False, staleness=bound)
    for _ in range(40):
        collector.update_policy_weights_(worker_ids=0)
    came = Counter[int]()
    while not came[0] or (mode != "pace" and not collector.stale_frames[1]):
        about = collector.next(timeout_s=20)["collector"]
        [worker_id] = set(about["worker_id"].flatten().tolist())
        came[worker_id] += 1
        ages = 40 - about["policy_version"]
        assert collector.version_lag == (0, 0, 0)
        assert collector.policy_age == (ages.min(), ages.double().mean(), ages.max())
        if mode == "mask":
            assert torch.equal(about["mask"], ages <= 2)
    assert mode == "mask" or not came[1]
    collector.update_policy_weights_(worker_ids=1)
    while 1 not in collector.next(timeout_s=20)["collector", "worker_id"]:
        pass
    assert mode == "mask" or collector.policy_age.max <= 2


def load_and_check(
    collector: dc.RPCDataCollector, policy: Telling, loaded: Callable[[], object] = lambda: None
) -> None:
    collector.load_state_dict({**collector.state_dict(), "policy_version": LOADED})
    loaded()
    for _ in range(4):
        batch = collector.next(timeout_s=20)
        assert (batch["collector", "policy_version"] == LOADED).all()
        assert told(batch)["wide"] == 1
    collector.update_policy_weights_(policy.fill(2))
    while told(batch := collector.next(timeout_s=20))["wide"] != 2:
        pass
    assert (batch["collector", "policy_version"][0, -1] == LOADED + 1).all()


@pytest.mark.parametrize("sync", [True, False])
def test_what_was_acknowledged(collect: Collect, sync: bool) -> None:
    policy = Telling()
    collector = collect(policy, sync=sync, staleness=None if sync else dc.Staleness(0, mode="drop"))
    collector.update_policy_weights_(policy.fill(1))
    load_and_check(collector, policy)


def test_what_was_on_its_way(collect: Collect) -> None:
    policy = Telling()
    updater = HeldUp()
    collector = collect(policy, weight_updater=updater)
    collector.update_policy_weights_(policy.fill(1), wait=False)
    assert updater.begun.wait(20)
    load_and_check(collector, policy, threading.Timer(0.2, updater.may_go_on.set).start)
