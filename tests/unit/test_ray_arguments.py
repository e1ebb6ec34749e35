"""What a RayDataCollector makes of its arguments. Ray is not needed, and nothing is started."""

from __future__ import annotations

import inspect
import signal
import socket
import sys
from typing import Any

import pytest
import torch

import distcollect as dc
from distcollect.collectors.options import RPCOptions
from distcollect.integrations.ray import cluster as ray_cluster
from distcollect.integrations.ray import job as ray_job
from distcollect.integrations.ray.collector import RayOptions
from distcollect.integrations.ray.settings import RaySettings
from distcollect.integrations.torchrl.arguments import translated

GIVEN: dict[str, Any] = {"create_env_fn": "CartPole-v1", "frames_per_batch": 8}


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """An import of Ray raises, as if it weren't installed."""
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def options(**given: Any) -> RayOptions:
    """The options that the collector makes of arguments, of TorchRL's too."""
    names = inspect.signature(dc.RayDataCollector).parameters.keys()
    own = {name: value for name, value in {**GIVEN, **given}.items() if name in names}
    others = {name: value for name, value in given.items() if name not in names}
    return RayOptions(**translated(others, own, names))


def test_torchrls_arguments() -> None:
    made = options(
        num_collectors=2,
        num_workers_per_collector=1,
        ray_init_config={"address": "10.0.0.1:6379", "num_cpus": None},
        remote_configs={"num_cpus": 2, "num_gpus": 0.5, "memory": 2**30, "resources": {"tpu": 1}},
        collector_class="single",
        update_after_each_batch=True,
        use_env_creator=False,
        sync=True,
    )
    assert made.num_to_start == made.rollouts_per_batch == 2
    assert made.update_at_each_batch
    assert made.placer.init_config == {"address": "10.0.0.1:6379", "num_cpus": None}
    assert made.placer.options(1) == {
        "num_cpus": 2,
        "num_gpus": 0.5,
        "memory": 2**30,
        "resources": {"tpu": 1},
        "max_restarts": -1,
    }
    assert made.placer.resources(1) == {"CPU": 2, "GPU": 0.5, "memory": 2**30, "tpu": 1}


def test_defaults() -> None:
    made = options(num_workers=3)
    assert made.placer == RaySettings()
    assert made.placer.options(0) == {"num_cpus": 1, "max_restarts": -1}
    assert made.placer.resources(2) == {"CPU": 1}
    assert not made.sync


def test_a_list_has_an_entry_for_each_worker() -> None:
    made = options(create_env_fn=["CartPole-v1"] * 2, remote_configs=[{"num_cpus": 2}, {}])
    assert [made.placer.resources(w) for w in range(2)] == [{"CPU": 2}, {"CPU": 1}]


def test_ray_is_not_installed() -> None:
    with pytest.raises(dc.LaunchError, match=r"pip install 'distcollect\[ray\]'"):
        dc.RayCollector(**GIVEN, num_collectors=2)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("ray://10.0.0.1:10001", "Ray Client, whose process is outside of the cluster"),
        ("127.0.0.1:{port}", r"no Ray cluster can be reached at 127.0.0.1:.*ray start --head"),
    ],
)
@pytest.mark.parametrize("by", ["ray_init_config", "RAY_ADDRESS"])
def test_addresses_that_are_of_no_use(
    address: str, message: str, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ray:
        @staticmethod
        def is_initialized() -> bool:
            return False

    monkeypatch.setattr(ray_cluster, "load_ray", Ray)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    config = {"address": address.format(port=port)}
    if by == "RAY_ADDRESS":
        monkeypatch.setenv("RAY_ADDRESS", config.pop("address"))
    with pytest.raises(dc.LaunchError, match=message):
        ray_cluster.connect(config)


def test_devices_may_be_on_other_hosts() -> None:
    made = options(
        num_workers=1,
        policy_device=f"cuda:{torch.cuda.device_count()}",
        remote_configs={"num_gpus": 1},
    )
    assert made.devices.policy is not None


def test_in_a_job_of_ray_any_collector_for_several_hosts_asks_ray(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray_job, "num_workers", lambda: 3)
    assert RPCOptions(**GIVEN, num_workers=2).placer is None
    with ray_job.running():
        made = RPCOptions(**GIVEN)
        assert made.num_to_start == 3
        assert made.placer == RaySettings()
    assert RPCOptions(**GIVEN, num_workers=2).placer is None


def test_the_handler_of_sigterm_stays_in_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    """``ray.init`` replaces it."""

    class Ray:
        is_initialized = staticmethod(lambda: False)
        shutdown = staticmethod(lambda: None)

        @staticmethod
        def init() -> None:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    received = []
    monkeypatch.setattr(ray_cluster, "load_ray", Ray)
    before = signal.signal(signal.SIGTERM, lambda *_: received.append("SIGTERM"))
    try:
        ray_cluster.connect({})
        signal.raise_signal(signal.SIGTERM)
        ray_cluster.release()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received == ["SIGTERM"]
