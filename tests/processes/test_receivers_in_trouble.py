"""Weights for workers that are slow, fail or are replaced."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from typing import Any

import cloudpickle
import pytest
import torch
from helpers.publishing import AsFromAfar, Disturbed, Telling, pids, telling_workers, told
from helpers.waiting import stop_process

import distcollect as dc

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers can't import test modules


class TestReceiversInTrouble:
    @pytest.mark.parametrize("make", [dc.BroadcastUpdater, dc.TransportUpdater, dc.AutoUpdater])
    def test_one_that_is_late_gets_the_newest_when_it_answers(self, make: Any) -> None:
        policy = Telling()
        # The others answer in time even on a busy machine.
        weight_sync = dc.WeightSync(ready_timeout_s=2)
        with telling_workers(
            policy, 3, weight_sync=weight_sync, weight_updater=make()
        ) as collector:
            stopped = pids(collector.next())[1]
            stop_process(stopped)
            try:
                first = collector.update_policy_weights_(policy.fill(1))
                assert first.acknowledged == {0: 1, 2: 1}
                assert isinstance(first.left_out[1], dc.WeightsTimeout)
                begin = time.monotonic()
                last = collector.update_policy_weights_(policy.fill(2))
                assert time.monotonic() - begin < 2, "it is waited for once only"
                assert last.acknowledged == {0: 2, 2: 2}
                with pytest.raises(dc.BatchTimeout, match=r"workers \[1\] to acknowledge"):
                    collector.next(timeout_s=0.5)
            finally:
                os.kill(stopped, signal.SIGCONT)
            batch = collector.next()
            assert (batch["collector", "policy_version"] == 2).all()
            assert [told(batch, row)["wide"] for row in range(3)] == [2, 2, 2]
            last.wait(5)
            assert last.acknowledged == {0: 2, 1: 2, 2: 2}
            assert first.acknowledged == {0: 1, 1: 2, 2: 1}
            assert not first.left_out

    @pytest.mark.parametrize(
        ("num_workers", "victim", "connected"),
        [*((4, victim, False) for victim in range(4)), (1, 0, False), (3, 1, True)],
    )
    def test_one_that_dies_once_it_is_ready(
        self, num_workers: int, victim: int, connected: bool
    ) -> None:
        """Also before the group's first use; workers that it should send to don't wait."""
        policy, updater = Telling(), Disturbed()
        with telling_workers(
            policy, num_workers, faults=dc.Faults(max_restarts=0), weight_updater=updater
        ) as collector:
            killed = pids(collector.next())[victim]
            if connected:
                collector.update_policy_weights_(policy)
            updater.disturb = lambda: os.kill(killed, signal.SIGKILL)
            begin = time.monotonic()
            handle = collector.update_policy_weights_(policy.fill(1), wait=False)
            assert handle is not None
            with contextlib.suppress(dc.WorkerLost):
                handle.wait(20)
            assert time.monotonic() - begin < 5, "no timeout has to pass"
            others = {w for w in range(num_workers) if w != victim}
            assert handle.acknowledged == dict.fromkeys(others, 1 + connected)
            assert isinstance(handle.left_out[victim], dc.WorkerLost)
            assert handle.left_out[victim].worker_id == victim

    def test_when_all_are_late_the_trainer_waits(self) -> None:
        policy = Telling()
        weight_sync = dc.WeightSync(ready_timeout_s=0.2)
        with telling_workers(policy, 1, weight_sync=weight_sync) as collector:
            stopped = pids(collector.next())[0]
            stop_process(stopped)
            resume = threading.Timer(1, os.kill, (stopped, signal.SIGCONT))
            resume.start()
            try:
                handle = collector.update_policy_weights_(policy.fill(1))
            finally:
                resume.join()
            assert handle is not None
            assert handle.acknowledged == {0: 1}


@pytest.mark.parametrize("num_bytes", [1 << 10, 64 << 20], ids=["small", "large"])
def test_one_that_is_stopped_in_the_middle_leaves_the_others_in_one_group(num_bytes: int) -> None:
    """Those that wait for it get the version together, long before the push's own deadline.

    A small payload fits into the buffers of the connections, and a large one does not.
    """
    policy = Telling()
    policy.register_buffer("ballast", torch.zeros(num_bytes, dtype=torch.uint8))
    updater = Disturbed()
    # A stopped process is not lost, and no broadcast is given up for its length.
    faults = dc.Faults(silence_timeout_s=300, weights_timeout_s=300)
    with telling_workers(policy, 5, faults=faults, weight_updater=updater) as collector:
        stopped = pids(collector.next())[0]  # it is to pass the payload on to workers 2 and 4
        collector.update_policy_weights_(policy)  # now all are connected
        updater.groups.clear()
        updater.disturb = lambda: stop_process(stopped)
        handle = collector.update_policy_weights_(policy.fill(1), wait=False)
        assert handle is not None
        try:
            handle.wait(60)
            assert updater.groups == [(0, 1, 2, 3, 4), (2, 4)]
            assert handle.acknowledged == dict.fromkeys((1, 2, 3, 4), 2)
            assert isinstance(handle.left_out[0], dc.WeightsTimeout)
        finally:
            os.kill(stopped, signal.SIGCONT)
        batch = collector.next()
        assert (batch["collector", "policy_version"] == 2).all()
        assert [told(batch, row)["wide"] for row in range(5)] == [1] * 5
        assert updater.groups[2:] == [(0,)]
        assert handle.acknowledged == dict.fromkeys(range(5), 2)


@pytest.mark.parametrize("what", ["dies", "is stopped"])
def test_a_relay_that_is_lost_in_the_middle_costs_the_others_one_try(what: str) -> None:
    """They get the weights from another one, long before the push's own deadline."""
    policy, updater = Telling(), AsFromAfar()
    policy.register_buffer("ballast", torch.zeros(64 << 20, dtype=torch.uint8))
    faults = dc.Faults(silence_timeout_s=300, weights_timeout_s=300, max_restarts=0)
    given = {"transport": "tcp", "weight_updater": updater, "faults": faults}
    weight_sync = dc.WeightSync(ready_timeout_s=1)
    with telling_workers(policy, 4, weight_sync=weight_sync, **given) as collector:
        relay = pids(collector.next())[0]
        stop_process(relay)  # when its buffers are full, nothing more can be sent to it
        updater.has_begun.clear()
        handle = collector.update_policy_weights_(policy.fill(1), wait=False)
        assert handle is not None
        try:
            assert updater.has_begun.wait(60)
            if what == "dies":
                os.kill(relay, signal.SIGKILL)
            handle.wait(60)
            assert updater.relays_of == [{1: 0, 2: 0, 3: 0}, {2: 1, 3: 1}]
            assert handle.acknowledged == {1: 1, 2: 1, 3: 1}
            kind = dc.WorkerLost if what == "dies" else dc.WeightsTimeout
            assert isinstance(handle.left_out[0], kind)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(relay, signal.SIGCONT)
        rows = range(3 if what == "dies" else 4)
        batch = collector.next()
        assert [told(batch, row)["wide"] for row in rows] == [1] * len(rows)
        assert (batch["collector", "policy_version"] == 1).all()
