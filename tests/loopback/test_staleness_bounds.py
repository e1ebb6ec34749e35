"""How old the weights of delivered frames may be."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import cloudpickle
import pytest
import torch
from helpers.publishing import Collect, Telling, collect

import distcollect as dc

__all__ = ["collect"]

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers can't import test modules


class TestStaleness:
    def run(
        self, collector: dc.RPCDataCollector, policy: Telling, batches: int = 60
    ) -> list[dc.LagStats]:
        """Publish after each batch; check and return the lags of all batches."""
        lags = []
        for _ in range(batches):
            batch = collector.next()
            versions = batch["collector", "policy_version"]
            assert (batch["wide"] == versions).all()
            lag = collector.policy_version - versions
            stats = collector.version_lag
            assert stats is not None
            assert stats == (int(lag.min()), float(lag.double().mean()), int(lag.max()))
            lags.append(stats)
            collector.update_policy_weights_(
                policy.fill(collector.policy_version + 1), wait=len(lags) % 2 == 0
            )
        return lags

    @pytest.mark.parametrize(
        ("mode", "max_lag"), [("pace", 0), ("pace", 1), ("pace", 3), ("drop", 0), ("drop", 2)]
    )
    def test_the_bound_is_kept(self, collect: Collect, mode: Any, max_lag: int) -> None:
        """By pacing nothing is given up; what is dropped is counted."""
        policy = Telling()
        collector = collect(
            policy,
            sync=False,
            num_workers=4,
            total_frames=60 * 4,
            staleness=dc.Staleness(max_lag, mode=mode),
        )
        lags = self.run(collector, policy)
        assert max(lag.max for lag in lags) <= max_lag
        stale = sum(collector.stale_frames.values())
        assert stale % 4 == 0
        if mode == "pace" or max_lag == 0:
            assert (stale > 0) == (mode == "drop")
        with pytest.raises(StopIteration):
            collector.next()

    def test_mask_marks_each_frame(self, collect: Collect) -> None:
        policy = Telling()
        collector = collect(
            policy, sync=False, num_workers=3, staleness=dc.Staleness(0, mode="mask")
        )
        masked = 0
        for _ in range(40):
            batch = collector.next()
            fresh = batch["collector", "policy_version"] == collector.policy_version
            assert batch["collector", "mask"].dtype == torch.bool
            assert torch.equal(batch["collector", "mask"], fresh)
            masked += int((~fresh).sum())
            collector.update_policy_weights_(policy.fill(collector.policy_version + 1))
        assert masked == sum(collector.stale_frames.values()) > 0

    def test_a_worker_left_out_on_purpose_is_not_late(self, collect: Collect) -> None:
        policy = Telling()
        collector = collect(policy, sync=False, staleness=dc.Staleness(0, mode="drop"))
        for _ in range(20):
            collector.update_policy_weights_(policy, worker_ids=0)
        seen: set[int] = set()
        deadline = time.monotonic() + 20
        while seen != {0, 1}:
            batch = collector.next()
            seen.add(int(batch["collector", "worker_id"][0, 0]))
            assert collector.version_lag == (0, 0.0, 0)
            assert time.monotonic() < deadline

    def test_swaps_between_rollouts_only(self, collect: Collect) -> None:
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
