"""TorchRL's names for collectors, their methods and their arguments, in one process."""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest
import torch
from helpers.envs import SamplingEnv
from tensordict import TensorDict
from torch import nn

import distcollect as dc


def make(**settings: Any) -> dc.SyncDataCollector:
    return dc.SyncDataCollector(SamplingEnv, **{"frames_per_batch": 8, **settings})


@pytest.mark.parametrize(
    ("newer", "older"),
    [
        ("BaseCollector", "DataCollectorBase"),
        ("AsyncCollector", "aSyncDataCollector"),
        ("MultiSyncCollector", "MultiSyncDataCollector"),
        ("MultiAsyncCollector", "MultiaSyncDataCollector"),
        ("RPCCollector", "RPCDataCollector"),
        ("DistributedCollector", "DistributedDataCollector"),
        ("DistributedSyncCollector", "DistributedSyncDataCollector"),
    ],
)
def test_both_generations_of_names(newer: str, older: str) -> None:
    assert getattr(dc, newer) is getattr(dc, older)


class TestCollector:
    """``Collector`` is a collector of this process, or selects one with workers."""

    def test_steps_envs_in_this_process(self) -> None:
        with dc.Collector(SamplingEnv, frames_per_batch=8, backend="direct") as collector:
            assert type(collector) is dc.Collector
            assert isinstance(collector, dc.SyncDataCollector)
            assert collector.next().shape == (8,)
        names = inspect.signature(dc.Collector).parameters
        assert {"backend", "backend_options", "num_collectors", "sync"} <= set(names)
        assert set(inspect.signature(dc.SyncDataCollector).parameters) < set(names)

    @pytest.mark.parametrize(
        ("settings", "kind", "expected"),
        [
            ({"num_collectors": 2}, "MultiaSyncDataCollector", {"num_collectors": 2}),
            ({"backend": "process"}, "MultiaSyncDataCollector", {}),
            ({"backend": "process", "sync": True}, "MultiSyncDataCollector", {}),
            ({"backend": "rpc", "sync": True}, "RPCDataCollector", {"sync": True}),
            (
                {"backend": "distributed", "backend_options": {"launcher": "mp"}},
                "DistributedDataCollector",
                {"sync": False, "launcher": "mp"},
            ),
            ({"backend": "submitit"}, "RPCDataCollector", {"sync": False, "launcher": "submitit"}),
            (
                {"backend": "ray", "num_collectors": 2, "backend_options": {"remote_configs": {}}},
                "RayDataCollector",
                {"num_collectors": 2, "sync": False, "remote_configs": {}},
            ),
        ],
    )
    def test_selects_a_collector_with_workers(
        self,
        settings: dict[str, Any],
        kind: str,
        expected: dict[str, Any],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        made: dict[str, Any] = {}

        def collector(*args: Any, **kwargs: Any) -> None:
            made.update(kwargs, args=args)

        module = "integrations.ray.collector" if "Ray" in kind else "collectors.classes"
        monkeypatch.setattr(f"distcollect.{module}.{kind}", collector)
        dc.Collector(SamplingEnv, frames_per_batch=8, **settings)
        expected = {"num_collectors": 1, "frames_per_batch": 8, **expected}
        assert made == {"args": (SamplingEnv,), **expected}

    def test_a_derived_class_is_made_as_it_is(self) -> None:
        class Mine(dc.Collector):
            pass

        with Mine(SamplingEnv, frames_per_batch=8) as collector:
            assert type(collector) is Mine


class TestLength:
    @pytest.mark.filterwarnings("ignore:total_frames=20:UserWarning")
    @pytest.mark.parametrize("total_frames", [24, 20])
    def test_is_the_number_of_batches(self, total_frames: int) -> None:
        with make(total_frames=total_frames) as collector:
            assert len(collector) == len(list(collector)) == len(collector) == 3

    def test_an_endless_collector_has_none_and_is_not_empty(self) -> None:
        with make() as collector:
            with pytest.raises(TypeError, match="endless"):
                len(collector)
            assert bool(collector)
            assert collector.stats().keys().isdisjoint(("total_frames", "completed"))


class TestAttributes:
    def test_before_and_after_shutdown(self) -> None:
        env = SamplingEnv()
        collector = dc.SyncDataCollector(env, frames_per_batch=8, init_random_frames=16)
        assert not collector.closed
        assert collector.env is env
        assert collector.policy is None
        assert collector.replay_buffer is None
        assert collector.requested_frames_per_batch == 8
        assert collector.init_random_frames == 16
        assert collector.getattr_env("action_space") is env.action_space
        collector.shutdown(timeout=5, close_env=True)
        assert collector.closed

    def test_of_the_policy_and_the_buffer(self) -> None:
        class Buffer:
            size = 5

            def extend(self, data: TensorDict) -> None: ...

        class Policy(nn.Module):
            name = "mine"

            def forward(self, observation: torch.Tensor) -> torch.Tensor:
                return torch.zeros(len(observation), dtype=torch.int64)

        policy, buffer = Policy(), Buffer()
        with make(policy=policy, replay_buffer=buffer) as collector:
            assert collector.policy is policy
            assert collector.replay_buffer is buffer
            assert collector.getattr_policy("name") == "mine"
            assert collector.getattr_rb("size") == 5
            assert collector.get_distant_attr("policy.name") == "mine"
            assert collector.map_fn("getattr_policy", [("name",), ("name",)]) == ["mine"] * 2
            with pytest.raises(dc.ArgumentError, match="in list_of_kwargs, not 1"):
                collector.map_fn("getattr_policy", [("name",), ("name",)], [{}])

    def test_reset_begins_new_trajectories(self) -> None:
        with make() as collector:
            before = collector.next()["collector", "traj_ids"]
            collector.reset()
            after = collector.next()["collector", "traj_ids"]
        assert set(before.tolist()).isdisjoint(after.tolist())

    def test_rollout_is_next(self) -> None:
        with make(total_frames=16) as collector:
            assert collector.rollout().shape == (8,)
            assert len(list(collector.iterator())) == 1


class TestStats:
    def test_are_a_dict_that_json_takes(self) -> None:
        with make(total_frames=16) as collector:
            before = collector.stats()
            assert (before["frames"], before["batches"], before["completed"]) == (0, 0, False)
            list(collector)
            stats = json.loads(json.dumps(collector.stats()))
        assert (stats["frames"], stats["batches"], stats["completed"]) == (16, 2, True)
        assert (stats["total_frames"], stats["requested_frames_per_batch"]) == (16, 8)
        assert stats["policy_version"] == 0
        assert all(isinstance(value, int | float | str | None) for value in stats.values())

    def test_of_each_worker(self) -> None:
        with make() as collector:
            collector.next()
            assert collector.stats(workers="both")["worker_0/frames"] == 8
            own = collector.stats(workers="per_worker")
            assert own.keys() == collector.stats().per_worker().keys()
            assert "frames" not in own
            with pytest.raises(ValueError, match="workers must be one of"):
                collector.stats(workers="some")


class TestArguments:
    def test_whole_numbers_may_be_floats(self) -> None:
        with make(frames_per_batch=8.0, total_frames=1.6e1) as collector:
            assert len(list(collector)) == 2

    def test_one_device_for_each_worker(self) -> None:
        with make(storing_device=["cpu", torch.device("cpu")]) as collector:
            assert collector.next().device == torch.device("cpu")
        with pytest.raises(dc.ArgumentError, match="a list has one device for each worker"):
            make(storing_device=["cpu", "meta"])

    def test_a_warning_names_the_users_line(self) -> None:
        with pytest.warns(UserWarning, match="compile_policy=True has no effect here") as caught:
            make(compile_policy=True).shutdown()
        assert caught[0].filename == __file__

    @pytest.mark.parametrize(("sync", "message"), [(False, "has no sync"), (True, "num_workers=0")])
    def test_sync_may_say_what_the_class_does(self, sync: bool, message: str) -> None:
        """Then the next argument is refused."""
        settings: dict[str, Any] = {"frames_per_batch": 8, "sync": sync, "num_workers": 0}
        with pytest.raises(dc.ArgumentError, match=message):
            dc.MultiSyncDataCollector(SamplingEnv, **settings)

    @pytest.mark.parametrize("frames", [[4], [4, 4, 4]])
    def test_a_list_of_frames_has_one_number_for_each_worker(self, frames: list[int]) -> None:
        with pytest.raises(ValueError, match="exactly one value per worker"):
            dc.MultiSyncDataCollector([SamplingEnv] * 2, frames_per_batch=frames)  # type: ignore[arg-type]

    def test_the_version_at_the_root(self) -> None:
        with make(track_policy_version=True) as collector:
            batch = collector.next()
        assert torch.equal(batch["policy_version"], batch["collector", "policy_version"])
        assert torch.equal(batch["next", "policy_version"], batch["collector", "policy_version"])

    def test_no_entries_of_the_collector(self) -> None:
        with make(track_traj_ids=False) as collector:
            assert "collector" not in collector.next().keys()  # noqa: SIM118

    def test_a_policy_beside_its_factory(self) -> None:
        class Policy(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.zeros(()))

            def forward(self, observation: torch.Tensor) -> Any:
                return torch.zeros(len(observation), dtype=torch.int64), {
                    "weight": self.weight.expand(len(observation))
                }

        policy = Policy()
        policy.weight.data.fill_(3)
        with make(policy=policy, policy_factory=Policy) as collector:
            assert (collector.next()["weight"] == 3).all()
