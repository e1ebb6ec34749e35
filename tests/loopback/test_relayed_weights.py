"""Weights travel once for each host: one worker relays them to the others there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import nccl_stand_in
from helpers.loopback_pool import loopback_collector, workers_of
from helpers.loopback_transport import LoopbackTransport
from helpers.publishing import Telling, told

import distcollect as dc
from distcollect.weights import broadcast, process_groups, updaters

# Of each worker; the last two share no memory.
HOSTS = ("a", "b", "a", "b", "a", None, None)
# By an updater's class: of which kind the sources are of those that have no relay.
SENT: dict[Any, Any] = {
    dc.AutoUpdater: broadcast.BroadcastSource,
    dc.TransportUpdater: updaters.InlineSource,
}


class Received:
    """Counts what receivers take, by the kind of their source."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kinds: list[str] = []
        self.backends: set[str] = set()  # of broadcasts
        self._lock = threading.Lock()
        for kind in (*SENT.values(), updaters.SharedMemorySource):
            monkeypatch.setattr(kind, "receive", self._counted(kind.__name__, kind.receive))

    def _counted(self, kind: str, receive: Callable[..., Any]) -> Callable[..., Any]:
        def counted(source: Any, target: torch.Tensor, state: dict[str, Any]) -> Any:
            with self._lock:
                self.kinds.append(kind)
                if kind == "BroadcastSource":
                    self.backends.add(source.backend)
            return receive(source, target, state)

        return counted


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> Received:
    return Received(monkeypatch)


@pytest.fixture
def updater() -> Any:
    return dc.AutoUpdater


@pytest.fixture
def collector(updater: Any) -> Iterator[dc.RPCDataCollector]:
    with loopback_collector(
        "CartPole-v1",
        Telling(),
        frames_per_batch=14,
        num_workers=len(HOSTS),
        sync=True,
        weight_updater=updater,
    ) as collector:
        workers = workers_of(collector)
        workers.transport.hosts = {
            workers.peers[worker_id]: host for worker_id, host in enumerate(HOSTS) if host
        }
        yield collector


def versions_told(collector: dc.RPCDataCollector) -> list[float]:
    batch = collector.next()
    return [told(batch, row)["wide"] for row in range(len(HOSTS))]


@pytest.mark.parametrize("updater", SENT)
def test_one_of_each_host_is_sent_the_weights(
    collector: dc.RPCDataCollector, received: Received, updater: Any
) -> None:
    for version in (1, 2, 3):
        received.kinds.clear()
        handle = collector.update_policy_weights_(Telling(version))
        assert handle.acknowledged == dict.fromkeys(range(len(HOSTS)), version)
        assert sorted(received.kinds) == [SENT[updater].__name__] * 4 + ["SharedMemorySource"] * 3
        assert versions_told(collector) == [version] * len(HOSTS)


def test_a_worker_that_is_alone_on_its_host_needs_no_relay(
    collector: dc.RPCDataCollector, received: Received
) -> None:
    collector.update_policy_weights_(Telling(1), worker_ids=[2, 3])
    assert received.kinds == ["BroadcastSource"] * 2
    collector.update_policy_weights_(Telling(2), worker_ids=[2, 4])
    assert sorted(received.kinds[2:]) == ["BroadcastSource", "SharedMemorySource"]
    assert versions_told(collector) == [0, 0, 2, 1, 2, 0, 0]


@pytest.mark.parametrize("updater", SENT)
@pytest.mark.parametrize("what", ["the relay fails", "its memory can't be mapped", "it is damaged"])
def test_those_of_a_relay_get_it_whatever_goes_wrong(
    collector: dc.RPCDataCollector, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    kind: Any = updaters.RelaySource if what == "the relay fails" else updaters.SharedMemorySource
    receive, failures = kind.receive, iter([True, True])

    def fail(source: Any, target: torch.Tensor, state: dict[str, Any]) -> Any:
        if what == "its memory can't be mapped":
            raise PermissionError("/proc/1/fd/1")
        place = receive(source, target, state)
        if next(failures, False):
            if what == "the relay fails":
                raise RuntimeError(what)
            target[len(target) // 2] ^= 1
        return place

    monkeypatch.setattr(kind, "receive", fail)
    handle = collector.update_policy_weights_(Telling(1))
    assert handle.acknowledged == dict.fromkeys(range(len(HOSTS)), 1)
    assert versions_told(collector) == [1] * len(HOSTS)


@pytest.mark.parametrize("updater", SENT)
def test_payloads_of_different_sizes(received: Received, updater: Any) -> None:
    """Only what has changed travels, after all of it."""
    with loopback_collector(
        "CartPole-v1",
        Telling(),
        frames_per_batch=4,
        num_workers=2,
        sync=True,
        weight_sync=dc.WeightSync(changes_only=True),
        weight_updater=updater,
    ) as collector:
        workers = workers_of(collector)
        workers.transport.hosts = dict.fromkeys(workers.peers.values(), "a")
        for version in (1, 2, 3):
            collector.update_policy_weights_(Telling(version))
            batch = collector.next()
            assert [told(batch, row)["wide"] for row in range(2)] == [version] * 2
        assert received.kinds.count("SharedMemorySource") == 3


def put_on_gpus(collector: dc.RPCDataCollector, *gpus: str) -> None:
    """Have the trainer believe that the workers' policies are on these GPUs."""
    workers = workers_of(collector)
    workers.gpus.update(enumerate(gpus))


@pytest.fixture
def between_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The trainer's weights seem to be on a GPU of host a, and there is a backend between GPUs."""
    nccl_stand_in.register()
    monkeypatch.setattr(broadcast, "_AUTO", (nccl_stand_in.NAME, "gloo"))
    for module in (broadcast, updaters):
        monkeypatch.setattr(module, "gpu_of", lambda device: "a0")
    monkeypatch.setattr(
        LoopbackTransport, "shares_memory", lambda transport, peer: transport.host_key(peer) == "a"
    )
    monkeypatch.setattr(process_groups.torch_backends, "device_types", lambda name: ("cuda",))
    yield
    nccl_stand_in.end_waiting()


@pytest.mark.usefixtures("between_gpus")
class TestBetweenGpus:
    """With a stand-in for NCCL; worker 0 shares the trainer's GPU."""

    def test_one_of_each_gpu_is_in_the_broadcast(
        self, collector: dc.RPCDataCollector, received: Received
    ) -> None:
        put_on_gpus(collector, "a0", "b0", "a1", "b0", "a1", "c0", "d0")
        for version in (1, 2):
            received.kinds.clear()
            handle = collector.update_policy_weights_(Telling(version))
            assert handle.acknowledged == dict.fromkeys(range(len(HOSTS)), version)
            assert received.backends == {nccl_stand_in.NAME}
            # 0 has the trainer's memory, 3 that of 1, and 4 that of 2.
            assert sorted(received.kinds) == ["BroadcastSource"] * 4 + ["SharedMemorySource"] * 3
            assert versions_told(collector) == [version] * len(HOSTS)

    def test_without_a_gpu_for_one_worker_it_is_hosts_again(
        self, collector: dc.RPCDataCollector, received: Received
    ) -> None:
        put_on_gpus(collector, "a0", "b0", "a1", "b1", "a2", "c0", "")
        handle = collector.update_policy_weights_(Telling(1))
        assert handle.acknowledged == dict.fromkeys(range(len(HOSTS)), 1)
        assert received.backends == {"gloo"}
        # All workers on the trainer's host map its memory.
        assert sorted(received.kinds) == ["BroadcastSource"] * 3 + ["SharedMemorySource"] * 4
