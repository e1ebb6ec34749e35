"""What is published to whom, how it travels, and how old it may get."""

from __future__ import annotations

import collections
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers.loopback_pool import loopback_collector
from tensordict import TensorDict
from torch import nn

import distcollect as dc
from distcollect.weights.updaters import UpdaterContext

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers can't import test modules


class Env(gym.Env[Any, Any]):
    """Observes its process's id."""

    observation_space = spaces.Box(0, 1e9, (1,), np.float64)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.full(1, os.getpid(), np.float64), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.full(1, os.getpid(), np.float64), 0.0, False, False, {}


class Telling(nn.Module):
    """Writes the value of each of its weights into each frame."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.zeros(300, dtype=torch.float64))
        self.body = nn.Linear(4, 4)
        self.critic = nn.Linear(4, 1)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.fill(value)

    def fill(self, value: float) -> Telling:
        with torch.no_grad():
            for tensor in self.state_dict().values():
                tensor.fill_(value)
        return self

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        n = len(observation)
        told = {name: t.double().mean().expand(n) for name, t in self.state_dict().items()}
        told = {name.replace(".", "_"): value for name, value in told.items()}
        return torch.zeros(n, dtype=torch.int64), told


NAMES = [name.replace(".", "_") for name in Telling().state_dict()]


def told(batch: TensorDict, row: int = 0) -> dict[str, float]:
    """The weights' values in the last frame of a row."""
    return {name: float(batch[name][row, -1]) for name in NAMES}


Collect = Callable[..., dc.RPCDataCollector]


@pytest.fixture
def collect() -> Iterator[Collect]:
    """Makes collectors whose workers are threads of this process."""
    opened: list[dc.RPCDataCollector] = []

    def make(policy: Any = None, *, num_workers: int = 2, **kwargs: Any) -> dc.RPCDataCollector:
        kwargs = {"sync": True, "frames_per_batch": 4 * num_workers, **kwargs}
        if not kwargs["sync"]:
            kwargs["frames_per_batch"] = 4
        policy = Telling() if policy is None else policy
        collector = loopback_collector(Env, policy, num_workers=num_workers, **kwargs)
        opened.append(collector)
        return collector

    yield make
    for collector in opened:
        collector.shutdown()


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

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_what_is_not_finite_is_refused_on_demand(self, collect: Collect, value: float) -> None:
        policy = Telling()
        policy.critic.bias.data[0] = value
        with pytest.raises(dc.WeightsError, match=r"'critic.bias' holds a NaN or an infinity"):
            collect(weight_sync=dc.WeightSync(check_finite=True)).update_policy_weights_(policy)
        collector = collect()
        collector.update_policy_weights_(policy)
        assert not np.isfinite(told(collector.next())["critic_bias"])

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

    def test_a_change_of_another_version_than_the_receivers_is_refused(
        self, collect: Collect
    ) -> None:
        """One has got a newer one than was acknowledged: it is sent all of the next."""
        collector = collect(weight_sync=dc.WeightSync(changes_only=True))
        policy = Telling()
        collector.update_policy_weights_(policy.fill(1))
        weights = collector._session.workers.services[1]._engine.weights
        weights.commit(weights.layout.empty(), 7)
        policy.body.bias.data.fill_(2)
        collector.update_policy_weights_(policy)
        handle = collector.update_policy_weights_(policy)
        batch = collector.next()
        expected = {**dict.fromkeys(NAMES, 1.0), "body_bias": 2.0}
        assert [told(batch, row) for row in (0, 1)] == [expected, expected]
        assert handle.num_bytes == 0, "later ones are changes again"

    def test_what_is_excluded_stays(self, collect: Collect) -> None:
        collector = collect(weight_sync=dc.WeightSync(exclude=["critic.*", "count"]))
        collector.update_policy_weights_(Telling(5))
        kept = {"critic_weight": 0.0, "critic_bias": 0.0, "count": 0.0}
        assert told(collector.next()) == {**dict.fromkeys(NAMES, 5.0), **kept}
        state = Telling(6).state_dict()
        del state["critic.weight"]
        collector.update_policy_weights_(state)
        assert told(collector.next())["wide"] == 6

    def test_models_and_what_refers_to_them(self) -> None:
        """Policy and env maker see the published modules, and all have one version."""
        scale, shift, net = nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 2)
        models = {"scale": scale, "shift": shift, "net": net}

        class Shifted(Env):
            def step(self, action: Any) -> Any:
                return np.full(1, float(shift.bias)), float(shift.weight), False, False, {}

        def policy(observation: torch.Tensor) -> Any:
            seen = {name: m.bias[:1].expand(len(observation)) for name, m in models.items()}
            return net(observation.float()).argmax(-1), seen

        with dc.RPCDataCollector(
            Shifted, policy, num_workers=2, frames_per_batch=8, sync=True, models=models
        ) as collector:
            for value in (3.0, 4.0):
                for model in models.values():
                    model.weight.data.fill_(value)
                    model.bias.data.fill_(value)
                collector.update_policy_weights_()
                batch = collector.next()
                assert all((batch[name] == value).all() for name in models)
                assert (batch["next", "observation"] == value).all()
                assert (batch["next", "reward"] == value).all()
            new = {name: nn.Linear(1, 2 if name == "net" else 1) for name in models}
            collector.update_policy_weights_(new)
            assert (collector.next()["scale"] == float(new["scale"].bias.detach())).all()
            with pytest.raises(dc.WeightsError, match=r"missing key 'shift.weight'"):
                collector.update_policy_weights_({"scale": scale, "net": net})


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
        ],
    )
    def test_bad_names(
        self, collect: Collect, worker_ids: str, error: type[Exception], message: str
    ) -> None:
        with pytest.raises(error, match=message):
            collect().update_policy_weights_(worker_ids=worker_ids)

    @pytest.mark.parametrize("sync", [True, False])
    def test_by_itself(self, collect: Collect, sync: bool) -> None:
        policy = Telling()
        collector = collect(policy, sync=sync, update_at_each_batch=True)
        assert told(collector.next())["wide"] == 0
        policy.fill(1)
        last = collector._session.publisher.last
        collector.next()
        assert collector.policy_version == 1
        newest = [collector._session.pool._sent.newest(worker_id) for worker_id in (0, 1)]
        assert newest == [1 if sync or worker_id in last else 0 for worker_id in (0, 1)]
        deadline = time.monotonic() + 20
        while told(collector.next())["wide"] != 1:
            assert time.monotonic() < deadline

    def test_by_itself_also_to_those_who_lag(self) -> None:
        """One is so slow that none of its batches is taken meanwhile."""

        class Slow(Env):
            def step(self, action: Any) -> Any:
                threading.Event().wait(30)
                return super().step(action)

        def first_step_is_quick(context: Any) -> Any:
            return Slow() if context.worker_id == 2 else Env()

        collector = loopback_collector(
            first_step_is_quick,
            Telling(),
            num_workers=3,
            frames_per_batch=4,
            sync=False,
            update_at_each_batch=True,
            max_weight_update_interval=4,
        )
        try:
            for _ in range(30):
                collector.next()
                newest = [collector._session.pool._sent.newest(worker_id) for worker_id in range(3)]
                assert collector.policy_version - min(newest) <= 5
            assert newest[2] > 0
        finally:
            with pytest.raises(AssertionError, match="goes on after stop"):
                collector.shutdown()


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
    """Over a file; the first so many payloads arrive torn at worker 1."""

    def __init__(self, folder: Path, torn: int = 0) -> None:
        self.folder = folder
        self.torn = torn
        self.sent: list[tuple[int, ...]] = []
        self.arguments: Any = None

    def init(self, *args: Any, **kwargs: Any) -> None:
        self.arguments = args, kwargs

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
        "make", [dc.BroadcastUpdater, dc.RPCUpdater, dc.SharedMemoryUpdater, None]
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

    def test_a_server_s_weights_are_loaded_into_the_policy_first(self, collect: Collect) -> None:
        class Served(dc.RPCUpdater):
            def _get_server_weights(self) -> Any:
                return Telling(7)

        policy = Telling(1)
        collector = collect(policy, weight_updater=Served)
        collector.update_policy_weights_()
        assert told(collector.next(), 0)["wide"] == 7
        assert all((parameter == 7).all() for parameter in policy.parameters())
        # What is given is sent, and stays away from the trainer's own.
        collector.update_policy_weights_(Telling(3))
        assert told(collector.next(), 0)["wide"] == 3
        assert all((parameter == 7).all() for parameter in policy.parameters())

    def test_workers_by_their_policy_s_device(self, collect: Collect) -> None:
        collector = collect()
        cpu = torch.device("cpu")
        for version, devices in enumerate([cpu, [cpu], [cpu, cpu]], start=1):
            handle = collector.update_policy_weights_(Telling(version), worker_ids=devices)
            assert handle.acknowledged == {0: version, 1: version}
        with pytest.raises(TypeError, match="workers or devices, not both"):
            collector.update_policy_weights_(Telling(), worker_ids=[0, cpu])

    @pytest.mark.parametrize("make", [dc.RPCUpdater, dc.SharedMemoryUpdater])
    def test_between_processes(self, make: Any) -> None:
        policy = Telling()
        with dc.RPCDataCollector(
            Env, policy, num_workers=2, frames_per_batch=8, sync=True, weight_updater=make()
        ) as collector:
            for version in range(1, 4):
                collector.update_policy_weights_(policy.fill(version))
                batch = collector.next()
                assert [told(batch, row)["wide"] for row in (0, 1)] == [version, version]

    def test_what_arrives_torn_is_sent_again_and_never_used(
        self, collect: Collect, tmp_path: Path
    ) -> None:
        updater = FileUpdater(tmp_path, torn=2)
        collector = collect(weight_updater=updater)
        handle = collector.update_policy_weights_(Telling(1))
        assert handle.acknowledged == {0: 1, 1: 1}
        assert updater.sent == [(0, 1), (1,), (1,)]
        assert [told(collector.next(), row)["wide"] for row in (0, 1)] == [1, 1]

    def test_who_gets_it_torn_every_time_is_left_out(
        self, collect: Collect, tmp_path: Path
    ) -> None:
        collector = collect(weight_updater=FileUpdater(tmp_path, torn=99), sync=False)
        handle = collector.update_policy_weights_(Telling(1))
        assert handle.acknowledged == {0: 1}
        assert set(handle.left_out) == {1}
        assert "checksum" in str(handle.left_out[1])
        with pytest.raises(dc.WorkerError, match="checksum"):
            collector.update_policy_weights_(Telling(2), worker_ids=1)

    def test_nothing_is_left_of_a_push_that_a_shutdown_meets(self) -> None:
        def memories() -> list[str]:
            targets = []
            for fd in Path("/proc/self/fd").iterdir():
                with contextlib.suppress(OSError):
                    targets.append(str(fd.readlink()))
            return [target for target in targets if "memfd:distcollect" in target]

        before = len(memories())
        for _ in range(5):
            collector = dc.RPCDataCollector(Env, Telling(), num_workers=1, frames_per_batch=4)
            done = threading.Event()

            def push(collector: Any = collector, done: threading.Event = done) -> None:
                with contextlib.suppress(dc.DistCollectError):
                    while not done.is_set():
                        collector.update_policy_weights_(Telling(), wait=False)

            pusher = threading.Thread(target=push)
            pusher.start()
            collector.next()
            collector.shutdown()
            done.set()
            pusher.join(20)
        deadline = time.monotonic() + 20
        while len(memories()) > before:
            assert time.monotonic() < deadline, memories()
            time.sleep(0.05)

    def test_an_updater_that_raises_is_told_of(self) -> None:
        class Broken(dc.RPCUpdater):
            def sources(self, payload: Any, peers: Any) -> Any:
                raise KeyError("no such bucket")

        with dc.RPCDataCollector(
            Env,
            Telling(),
            num_workers=2,
            frames_per_batch=8,
            sync=True,
            weight_updater=Broken(),
        ) as collector:
            with pytest.raises(dc.WorkerError, match="no such bucket"):
                collector.update_policy_weights_()
            with pytest.raises(dc.WorkerError, match="no such bucket"):
                collector.next()

    def test_more_groups_than_are_kept(
        self, collect: Collect, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Both ends drop the same ones."""
        monkeypatch.setattr("distcollect.weights.broadcast._MAX_GROUPS", 2)
        collector = collect(num_workers=3, weight_updater=dc.BroadcastUpdater())
        for version in range(1, 13):
            worker_id = version % 3
            collector.update_policy_weights_(Telling(version), worker_ids=worker_id)
            assert told(collector.next(), worker_id)["wide"] == version
            assert len(collector._session.updater._groups.names) <= 2
            collector.update_policy_weights_(Telling(version), worker_ids=[0, 2])

    def test_groups_leave_nothing_in_the_store(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("distcollect.weights.broadcast._MAX_GROUPS", 2)
        limit_s = 0.2
        updater = dc.BroadcastUpdater()
        updater.attach(UpdaterContext("127.0.0.1", limit_s, {0: ""}))
        payload = torch.zeros(16, dtype=torch.uint8)
        for peer in range(20):
            updater.sources(payload, {0: peer})
        threading.Event().wait(limit_s)
        updater.sources(payload, {0: 20})
        assert updater._store.num_keys() == 3  # of two groups, and of one that was left just now
        updater.close()

    def test_who_can_get_none_ends_a_sync_run(self, collect: Collect, tmp_path: Path) -> None:
        """It must not go on with the weights that it has."""
        collector = collect(weight_updater=FileUpdater(tmp_path, torn=99))
        collector.update_policy_weights_(Telling(1))
        with pytest.raises(dc.WorkerError, match="checksum"):
            collector.next(timeout_s=20)

    def test_init_updater(self, collect: Collect, tmp_path: Path) -> None:
        updater = FileUpdater(tmp_path)
        collector = collect(weight_updater=updater)
        collector.init_updater(1, two=3)
        assert updater.arguments == ((1,), {"two": 3})
        with dc.SyncDataCollector(Env, Telling(), frames_per_batch=2) as alone:
            alone.init_updater(1, two=3)
            with pytest.raises(TypeError, match="no weight updater"):
                alone.update_policy_weights_(worker_ids=0)


def pids(collector: dc.RPCDataCollector) -> dict[int, int]:
    batch = collector.next()
    ids, pid = batch["collector", "worker_id"][:, -1], batch["observation"][:, -1, 0]
    return {int(i): int(p) for i, p in zip(ids, pid, strict=True)}


class TestReceiversInTrouble:
    @pytest.mark.parametrize("make", [dc.BroadcastUpdater, dc.RPCUpdater, dc.AutoUpdater])
    def test_one_that_is_late_gets_the_newest_when_it_answers(self, make: Any) -> None:
        policy = Telling()
        with dc.RPCDataCollector(
            Env,
            policy,
            num_workers=3,
            frames_per_batch=12,
            sync=True,
            # The others answer in time, also on a busy machine.
            weight_sync=dc.WeightSync(ready_timeout_s=2),
            weight_updater=make(),
        ) as collector:
            stopped = pids(collector)[1]
            os.kill(stopped, signal.SIGSTOP)
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

    def test_one_that_stops_in_the_middle_is_left_behind(self) -> None:
        """It says that it is ready, and then nothing more."""
        policy = Telling()
        with dc.RPCDataCollector(
            Env,
            policy,
            num_workers=3,
            frames_per_batch=12,
            sync=True,
            faults=dc.Faults(weights_timeout_s=1.5),
            weight_updater=dc.BroadcastUpdater(),
        ) as collector:
            stopped = pids(collector)[1]
            send = collector._session.updater.send

            def stop_first(payload: torch.Tensor) -> None:
                os.kill(stopped, signal.SIGSTOP)
                send(payload)

            collector._session.updater.send = stop_first  # type: ignore[method-assign]
            try:
                handle = collector.update_policy_weights_(policy.fill(1))
            finally:
                collector._session.updater.send = send  # type: ignore[method-assign]
                os.kill(stopped, signal.SIGCONT)
            assert handle.acknowledged.keys() >= {0, 2}
            batch = collector.next()
            assert (batch["collector", "policy_version"] == 1).all()
            assert [told(batch, row)["wide"] for row in range(3)] == [1, 1, 1]

    def test_one_that_dies_meanwhile(self) -> None:
        """It says that it is ready, and then it is gone."""
        policy = Telling()
        with dc.RPCDataCollector(
            Env,
            policy,
            num_workers=3,
            frames_per_batch=12,
            sync=True,
            faults=dc.Faults(max_restarts=0, min_workers=3),
            weight_updater=dc.BroadcastUpdater(),
        ) as collector:
            killed = pids(collector)[1]
            collector.update_policy_weights_(policy)  # now all are connected
            send = collector._session.updater.send

            def kill_first(payload: torch.Tensor) -> None:
                os.kill(killed, signal.SIGKILL)
                send(payload)

            collector._session.updater.send = kill_first  # type: ignore[method-assign]
            handle = collector.update_policy_weights_(policy.fill(1), wait=False)
            assert handle is not None
            handle.wait(20)
            assert handle.acknowledged == {0: 2, 2: 2}
            assert isinstance(handle.left_out[1], dc.WorkerLost)
            assert handle.left_out[1].worker_id == 1
            # What the others have may come first.
            with pytest.raises(dc.WorkerLost, match=r"worker 1: .*SIGKILL"):
                collections.deque(collector, maxlen=0)

    @pytest.mark.parametrize(
        ("num_workers", "victim"), [*((4, victim) for victim in range(4)), (1, 0)]
    )
    def test_one_that_dies_before_it_is_connected(self, num_workers: int, victim: int) -> None:
        """It was in the group; nobody had used it. Nor do those wait whom it was to pass it to."""
        policy = Telling()
        with dc.RPCDataCollector(
            Env,
            policy,
            num_workers=num_workers,
            frames_per_batch=4 * num_workers,
            sync=True,
            faults=dc.Faults(max_restarts=0),
            weight_updater=dc.BroadcastUpdater(),
        ) as collector:
            killed = pids(collector)[victim]
            send = collector._session.updater.send

            def kill_first(payload: torch.Tensor) -> None:
                collector._session.updater.send = send  # type: ignore[method-assign]
                os.kill(killed, signal.SIGKILL)
                send(payload)

            collector._session.updater.send = kill_first  # type: ignore[method-assign]
            begin = time.monotonic()
            handle = collector.update_policy_weights_(policy.fill(1), wait=False)
            assert handle is not None
            with contextlib.suppress(dc.WorkerLost):
                handle.wait(20)
            assert time.monotonic() - begin < 5, "no timeout has to pass"
            assert handle.acknowledged == {w: 1 for w in range(num_workers) if w != victim}
            assert isinstance(handle.left_out[victim], dc.WorkerLost)

    def test_when_all_are_late_the_trainer_waits(self) -> None:
        policy = Telling()
        with dc.RPCDataCollector(
            Env,
            policy,
            num_workers=1,
            frames_per_batch=4,
            sync=True,
            weight_sync=dc.WeightSync(ready_timeout_s=0.2),
        ) as collector:
            stopped = pids(collector)[0]
            os.kill(stopped, signal.SIGSTOP)
            resume = threading.Timer(1, os.kill, (stopped, signal.SIGCONT))
            resume.start()
            try:
                handle = collector.update_policy_weights_(policy.fill(1))
            finally:
                resume.join()
            assert handle is not None
            assert handle.acknowledged == {0: 1}

    def test_only_the_newest_of_what_was_not_sent_is_sent(self) -> None:
        policy = Telling()
        with dc.RPCDataCollector(
            Env, policy, num_workers=2, frames_per_batch=8, sync=True
        ) as collector:
            handles = [
                collector.update_policy_weights_(policy.fill(version), wait=False)
                for version in range(1, 201)
            ]
            assert handles[-1] is not None
            handles[-1].wait(20)
            assert all(handle is not None and handle.done() for handle in handles)
            sent = [handle.version for handle in handles if handle and handle.num_bytes]
            assert 200 in sent
            assert len(sent) < 200
            assert told(collector.next())["wide"] == 200


class TestStaleness:
    def run(
        self, collector: dc.RPCDataCollector, policy: Telling, batches: int = 60
    ) -> list[dc.LagStats]:
        """Publish after each batch; the lags of all batches, which are checked."""
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

    @pytest.mark.parametrize("max_lag", [0, 1, 3])
    def test_pace_keeps_the_bound_and_gives_nothing_up(
        self, collect: Collect, max_lag: int
    ) -> None:
        policy = Telling()
        collector = collect(
            policy, sync=False, num_workers=4, staleness=dc.Staleness(max_policy_lag=max_lag)
        )
        lags = self.run(collector, policy)
        assert max(lag.max for lag in lags) <= max_lag
        assert collector.stale_frames == dict.fromkeys(range(4), 0)

    @pytest.mark.parametrize("max_lag", [0, 2])
    def test_drop_keeps_the_bound_and_counts(self, collect: Collect, max_lag: int) -> None:
        policy = Telling()
        collector = collect(
            policy,
            sync=False,
            num_workers=4,
            total_frames=60 * 4,
            staleness=dc.Staleness(max_lag, mode="drop"),
        )
        lags = self.run(collector, policy)
        assert max(lag.max for lag in lags) <= max_lag
        assert sum(collector.stale_frames.values()) % 4 == 0
        if max_lag == 0:
            assert sum(collector.stale_frames.values()) > 0
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


BAD: Sequence[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: dc.WeightSync(wire_dtype="int8"), ValueError, "wire_dtype='int8'.*bfloat16"),
    (lambda: dc.WeightSync(exclude="critic"), TypeError, r"\['critic.\*'\]"),
    (lambda: dc.WeightSync(ready_timeout_s=0), ValueError, "ready_timeout_s=0"),
    (lambda: dc.Staleness(-1), ValueError, "max_policy_lag=-1"),
    (lambda: dc.Staleness(1.5), ValueError, "max_policy_lag=1.5"),  # type: ignore[arg-type]
    (lambda: dc.Staleness(1, mode="wait"), ValueError, "'pace', 'drop' or 'mask'"),
]


@pytest.mark.parametrize(("make", "error", "message"), BAD)
def test_bad_settings(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"models": [nn.Linear(1, 1)]}, TypeError, "dict of names to modules"),
        ({"models": {"a.b": nn.Linear(1, 1)}}, ValueError, "without dots"),
        ({"models": {"policy": nn.Linear(1, 1)}}, ValueError, "taken"),
        ({"weight_updater": "rpc"}, TypeError, "WeightUpdaterBase"),
        ({"max_weight_update_interval": 0}, ValueError, "at least 1"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        dc.RPCDataCollector(Env, Telling(), frames_per_batch=4, num_workers=1, **arguments)
