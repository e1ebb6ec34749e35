"""Weights between a trainer and workers on GPUs and CPUs, in each way, and members that die."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import cloudpickle
import figures
import pytest
import torch
from helpers import gpu_policies, nccl_stand_in
from helpers.gpu_policies import Where
from helpers.waiting import eventually, stop_process

import distcollect as dc
from distcollect.weights.process_groups import GroupMember, Groups

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers can't import test modules
nccl_stand_in.register()

# NCCL takes two members with the same name of a host for two members on one GPU, which it refuses.
# With a name for each, several share a GPU, and exchange data through sockets.
HOST = "NCCL_HOSTID"
ON_THE_TRAINER_S_HOST = "trainer"


@pytest.fixture(autouse=True)
def _name_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    os.environ.setdefault(HOST, ON_THE_TRAINER_S_HOST)  # NCCL reads it once


def be_on_a_host(name: str | None = None) -> None:
    """What a worker does first."""
    nccl_stand_in.register()
    os.environ[HOST] = str(os.getpid()) if name is None else name


@pytest.fixture
def backend(device: torch.device) -> str:
    """NCCL, or what stands in for it."""
    return "nccl" if device.type == "cuda" else nccl_stand_in.NAME


collect = partial(gpu_policies.collect, num_steps=4, init_fn=be_on_a_host)


def push(collector: dc.RPCDataCollector, policy: Where, value: float) -> Any:
    """Push, and check that all workers use the weights."""
    handle = collector.update_policy_weights_(policy.fill(value))
    assert handle is not None
    batch = collector.next()
    eventually(lambda: not handle.left_out, about=lambda: handle)
    assert (batch["collector", "policy_version"] == handle.version).all()
    assert (batch["lowest"] == value).all()
    assert (batch["highest"] == value).all()
    return handle


UPDATERS: dict[str, Callable[[], Any]] = {
    "auto": dc.AutoUpdater,
    "gloo": partial(dc.BroadcastUpdater, "gloo"),
    "rpc": dc.TransportUpdater,
    "shared memory": dc.SharedMemoryUpdater,
}


class TestWays:
    @pytest.mark.long
    @pytest.mark.parametrize("way", UPDATERS)
    def test_each_brings_them(self, device: torch.device, way: str) -> None:
        policy = Where(num_floats=1 << 20).to(device)
        with collect(policy, weight_updater=UPDATERS[way]()) as collector:
            for value in (1, 2, 3):
                push(collector, policy, value)

    @pytest.mark.long
    @pytest.mark.parametrize(("trainer", "workers"), [(True, False), (False, True)])
    def test_between_a_gpu_and_a_cpu(
        self, device: torch.device, trainer: bool, workers: bool
    ) -> None:
        policy = Where(num_floats=1 << 20).to(device if trainer else "cpu")
        with collect(policy, policy_device=str(device) if workers else "cpu") as collector:
            for value in (1, 2, 3):
                push(collector, policy, value)

    @pytest.mark.long
    def test_less_of_them(self, device: torch.device) -> None:
        policy = Where().to(device)
        options = dc.WeightSync(wire_dtype="bfloat16", changes_only=True)
        with collect(policy, weight_sync=options) as collector:
            whole = push(collector, policy, 1)
            with torch.no_grad():
                policy.last.fill_(2)
            changed = collector.update_policy_weights_(policy)
            assert changed is not None
            assert 0 < changed.num_bytes < whole.num_bytes
            batch = collector.next()
            assert (batch["lowest"] == 1).all()
            assert (batch["highest"] == 2).all()

    @pytest.mark.long
    def test_where_gpus_are_shared_the_log_says_why_it_is_not_nccl(
        self, gpu: torch.device, caplog: pytest.LogCaptureFixture
    ) -> None:
        policy = Where().to(gpu)
        workers = max(2, torch.cuda.device_count())  # with the trainer, one more than GPUs
        with (
            caplog.at_level(logging.INFO),
            collect(policy, workers, weight_updater=dc.BroadcastUpdater()) as collector,
        ):
            push(collector, policy, 1)
        assert "broadcast by gloo: WeightSync(backend='nccl'): trainer and workers need" in (
            caplog.text
        )
        with (
            collect(policy, weight_sync=dc.WeightSync(backend="nccl")) as collector,
            pytest.raises(dc.ArgumentError, match="need a GPU each"),
        ):
            collector.update_policy_weights_(policy)

    @pytest.mark.long
    def test_one_gpu_for_each_by_nccl(self, gpu: torch.device) -> None:
        if torch.cuda.device_count() < 2:
            pytest.skip("needs two GPUs")
        policy = Where(num_floats=1 << 20).to("cuda:0")
        others = [f"cuda:{n}" for n in range(1, torch.cuda.device_count())]
        with collect(
            policy,
            len(others),
            policy_device=others,
            init_fn=None,
            weight_sync=dc.WeightSync(backend="nccl"),
        ) as collector:
            for value in (1, 2, 3):
                push(collector, policy, value)


class TestOneBackendForGpus:
    """NCCL on one GPU; without a GPU its stand-in."""

    def test_a_group_of_one(self, device: torch.device, backend: str) -> None:
        """It is built, used, left, and built again."""
        groups = Groups()
        store = torch.distributed.HashStore()
        for name in ("first", "second"):
            place = GroupMember(name, 0, 1, 60.0, backend)
            groups.join(place, store, "127.0.0.1")
            flat = torch.ones(1 << 20, dtype=torch.uint8, device=device)
            for _ in range(2):
                groups.broadcast(place, flat)
            assert (flat == 1).all()
        groups.close()
        with pytest.raises(RuntimeError, match="was left"):
            groups.broadcast(place, flat)

    @pytest.mark.long
    def test_it_brings_them(self, device: torch.device, backend: str) -> None:
        policy = Where(num_floats=1 << 20).to(device)
        with collect(policy, weight_updater=figures.PretendGpus(backend)) as collector:
            for value in (1, 2, 3):
                push(collector, policy, value)

    @pytest.mark.long
    def test_gloo_takes_over_where_it_refuses(
        self,
        device: torch.device,
        backend: str,
        caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setenv(nccl_stand_in.DEVICE_VARIABLE, "the only one")
        policy = Where().to(device)
        with (
            caplog.at_level(logging.WARNING),
            collect(
                policy,
                init_fn=partial(be_on_a_host, ON_THE_TRAINER_S_HOST),
                weight_updater=figures.PretendGpus((backend, "gloo")),
            ) as collector,
        ):
            for value in (1, 2):
                push(collector, policy, value)
        assert f"not broadcast by {backend} any more" in caplog.text

    @pytest.mark.parametrize("is_connected", [False, True])
    def test_a_member_that_dies_in_mid_push(
        self, device: torch.device, backend: str, is_connected: bool
    ) -> None:
        """It is stopped, so that the others wait for it, and then killed."""
        policy = Where(num_floats=1 << (26 if device.type == "cuda" else 24)).to(device)
        updater = figures.PretendGpus(backend)
        with collect(policy, 3, weight_updater=updater) as collector:
            if is_connected:
                push(collector, policy, 1)
            victim = collector.call("process", worker_ids=1)[1][0]["pid"]
            send, sent = updater.send, threading.Event()
            waited: list[bool] = []

            def kill() -> None:
                waited.append(not sent.wait(0.5))
                os.kill(victim, signal.SIGKILL)

            def stop_first(payload: torch.Tensor) -> None:
                updater.send = send  # type: ignore[method-assign]
                stop_process(victim)
                threading.Thread(target=kill, daemon=True).start()
                try:
                    send(payload)
                finally:
                    sent.set()

            updater.send = stop_first  # type: ignore[method-assign]
            begin = time.monotonic()
            handle = collector.update_policy_weights_(policy.fill(2), wait=False)
            assert handle is not None
            eventually(lambda: handle.acknowledged.keys() >= {0, 2}, about=lambda: handle)
            assert time.monotonic() - begin < 50, "no timeout has to pass"
            assert waited == [True], "it was over before the member died"
            if 1 in handle.left_out:  # what replaces it may be there already
                assert isinstance(handle.left_out[1], dc.WorkerLost)
                assert handle.left_out[1].worker_id == 1
            batch = collector.next()
            assert (batch["collector", "policy_version"] == handle.version).all()
            assert (batch["lowest"] == 2).all()
            push(collector, policy, 3)
