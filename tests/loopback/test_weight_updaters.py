"""Weight updaters."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from helpers.envs import ProcessIdEnv
from helpers.publishing import NAMES, Collect, Telling, collect, told

import distcollect as dc
from distcollect.weights.updaters import UpdaterContext

__all__ = ["collect"]

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers can't import test modules


@dataclass(frozen=True)
class FromFile(dc.WeightSource):
    path: str
    flip: bool

    def receive(self, target: torch.Tensor, receiver_state: dict[str, Any]) -> None:
        data = bytearray(Path(self.path).read_bytes())
        if self.flip:
            data[len(data) // 2] ^= 1
        receiver_state["received"] = receiver_state.get("received", 0) + 1
        target.copy_(torch.frombuffer(data, dtype=torch.uint8))


class FileUpdater(dc.WeightUpdaterBase):
    """Sends weights through a file; the first ``torn`` payloads arrive damaged at worker 1."""

    def __init__(self, folder: Path, torn: int = 0) -> None:
        self.folder = folder
        self.torn = torn
        self.sent: list[tuple[int, ...]] = []

    def sources(
        self, payload: torch.Tensor, peers: Mapping[int, int]
    ) -> Mapping[int, dc.WeightSource]:
        path = self.folder / str(len(self.sent))
        path.write_bytes(payload.numpy().tobytes())
        self.sent.append(tuple(peers))
        self.torn -= 1
        return {w: FromFile(str(path), flip=w == 1 and self.torn >= 0) for w in peers}


class TestUpdaters:
    @pytest.mark.parametrize(
        "make", [dc.BroadcastUpdater, dc.TransportUpdater, dc.SharedMemoryUpdater, None]
    )
    def test_each_brings_the_weights(self, collect: Collect, tmp_path: Path, make: Any) -> None:
        updater = FileUpdater(tmp_path) if make is None else make()
        collector = collect(weight_updater=updater)
        for version in range(1, 6):
            selected = [None, 0, 1][version % 3]
            collector.update_policy_weights_(Telling(version), worker_ids=selected)
            batch = collector.next()
            for row in (0, 1):
                if selected in (None, row):
                    assert told(batch, row) == dict.fromkeys(NAMES, float(version))

    def test_workers_by_their_policy_s_device(self, collect: Collect) -> None:
        collector = collect()
        cpu = torch.device("cpu")
        for version, devices in enumerate([cpu, [cpu], [cpu, cpu]], start=1):
            handle = collector.update_policy_weights_(Telling(version), worker_ids=devices)
            assert handle.acknowledged == {0: version, 1: version}
        with pytest.raises(TypeError, match="worker ids or devices, not both"):
            collector.update_policy_weights_(Telling(), worker_ids=[0, cpu])

    def test_what_arrives_torn_is_sent_again_and_never_used(
        self, collect: Collect, tmp_path: Path
    ) -> None:
        updater = FileUpdater(tmp_path, torn=2)
        collector = collect(weight_updater=updater)
        handle = collector.update_policy_weights_(Telling(1))
        assert handle.acknowledged == {0: 1, 1: 1}
        assert updater.sent == [(0, 1), (1,), (1,)]
        assert [told(collector.next(), row)["wide"] for row in (0, 1)] == [1, 1]

    @pytest.mark.parametrize("sync", [True, False])
    def test_who_gets_it_torn_every_time_is_left_out(
        self, collect: Collect, tmp_path: Path, sync: bool
    ) -> None:
        """In sync mode the run ends: it must not continue with its old weights."""
        collector = collect(weight_updater=FileUpdater(tmp_path, torn=99), sync=sync)
        handle = collector.update_policy_weights_(Telling(1))
        assert handle.acknowledged == {0: 1}
        assert set(handle.left_out) == {1}
        assert "checksum" in str(handle.left_out[1])
        with pytest.raises(dc.WorkerError, match="checksum"):
            collector.update_policy_weights_(Telling(2), worker_ids=1)
        if sync:
            with pytest.raises(dc.WorkerError, match="checksum"):
                collector.next(timeout_s=20)

    def test_more_groups_than_are_kept(
        self, collect: Collect, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Both ends drop the same groups."""
        monkeypatch.setattr("distcollect.weights.broadcast._MAX_GROUPS", 2)
        collector = collect(num_workers=3, weight_updater=dc.BroadcastUpdater())
        for version in range(1, 13):
            worker_id = version % 3
            collector.update_policy_weights_(Telling(version), worker_ids=worker_id)
            assert told(collector.next(), worker_id)["wide"] == version
            collector.update_policy_weights_(Telling(version), worker_ids=[0, 2])

    def test_what_members_find_each_other_by_stays_for_a_while(self) -> None:
        """One that still connects in a group that failed must not wait: its next group would."""
        updater, payload, limit_s = dc.BroadcastUpdater(), torch.zeros(16, dtype=torch.uint8), 0.2
        updater.attach(UpdaterContext("127.0.0.1", limit_s, {0: ""}))
        updater.sources(payload, {0: 1})
        updater.forget(1)
        updater.sources(payload, {0: 2})
        assert updater._store.check(["weights0/0/0"])
        threading.Event().wait(2 * limit_s)
        updater.sources(payload, {0: 2})
        assert not updater._store.check(["weights0/0/0"])
        updater.close()

    def test_without_workers_there_is_none(self) -> None:
        with dc.SyncDataCollector(ProcessIdEnv, Telling(), frames_per_batch=2) as alone:
            alone.init_updater(1, two=3)
            with pytest.raises(TypeError, match="no weight updater"):
                alone.update_policy_weights_(worker_ids=0)


class WithoutSources(dc.WeightUpdaterBase):
    def __init__(self) -> None:
        self.told: list[str] = []

    def attach(self, context: UpdaterContext) -> None:
        self.told.append("attach")

    def check(self, device: torch.device, worker_ids: Sequence[int]) -> None:
        self.told.append("check")

    def close(self) -> None:
        self.told.append("close")


def test_an_updater_without_sources_is_told_of_the_run_too(collect: Collect) -> None:
    updater = WithoutSources()
    collector = collect(weight_updater=updater)
    collector.update_policy_weights_()
    collector.shutdown()
    assert updater.told == ["attach", "check", "close"]
