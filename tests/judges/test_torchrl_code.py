"""What code that was written for TorchRL's collectors relies on, with only its import changed."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule as Mod
from tensordict.nn import TensorDictSequential as Seq
from torch import nn

import distcollect as dc

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torchrl = pytest.importorskip("torchrl", reason="torchrl is not installed")
    import torchrl.collectors as theirs
    from torchrl._utils import seed_generator
    from torchrl.data import LazyTensorStorage, ReplayBuffer
    from torchrl.envs import GymEnv, SerialEnv
    from torchrl.modules import ConsistentDropoutModule

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers can't import test modules


def make_env() -> Any:
    return GymEnv("CartPole-v1")


def make_two() -> Any:
    return SerialEnv(2, make_env)


def first_states(seeds: list[int]) -> torch.Tensor:
    """The observations ``[n, 4]`` that single envs begin with, once TorchRL has seeded them."""
    states = []
    for seed in seeds:
        env = make_env()
        env.set_seed(seed)
        states.append(env.reset()["observation"])
    return torch.stack(states)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("where", ["in process", "two workers", "one worker"])
def test_set_seed_gives_envs_the_seeds_of_torchrl(where: str, static: bool) -> None:
    sizes: dict[str, Any] = {"frames_per_batch": 20, "total_frames": 20}
    if where == "in process":
        collector: Any = dc.Collector(make_two, **sizes)
    elif where == "one worker":
        collector = dc.MultiSyncCollector([make_two], **sizes)
    else:
        collector = dc.MultiSyncCollector([make_env, make_env], **sizes)
    second = 3 if static else seed_generator(3)
    with collector:
        following = collector.set_seed(3, static_seed=static)
        batch = collector.next()
    assert following == (3 if static else seed_generator(second))
    begin = batch["observation"].reshape(2, 10, 4)[:, 0]
    assert torch.equal(begin, first_states([3, second]))


def test_a_single_env_keeps_its_static_seed() -> None:
    with dc.Collector(make_env, frames_per_batch=10) as collector:
        assert collector.set_seed(3, static_seed=True) == 3
        assert collector.set_seed(3) == seed_generator(3)


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ({}, None),
        ({"env_device": "cpu"}, None),
        ({"env_device": "cpu", "policy_device": "cpu"}, torch.device("cpu")),
        ({"device": "cpu"}, torch.device("cpu")),
    ],
)
def test_the_device_of_a_batch(devices: dict[str, str], expected: torch.device | None) -> None:
    with dc.Collector(make_env, frames_per_batch=10, **devices) as collector:
        assert collector.next().device == expected


@pytest.mark.parametrize("input_shape", [None, (8,)])
def test_consistent_dropout(input_shape: tuple[int, ...] | None) -> None:
    dropout = ConsistentDropoutModule(
        p=0.5, in_keys=["hidden", "mask"], out_keys=["hidden", "mask"], input_shape=input_shape
    )
    policy = Seq(
        Mod(nn.Linear(4, 8), ["observation"], ["hidden"]),
        dropout,
        Mod(lambda hidden: torch.eye(2)[(hidden.sum(-1) > 0).long()], ["hidden"], ["action"]),
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        collector = dc.Collector(make_env, policy, frames_per_batch=40)
    with collector:
        batch = collector.next()
    # With a shape, each episode has one mask: without one, the env can't know its shape.
    told = [str(each.message) for each in caught if "ConsistentDropoutModule" in str(each.message)]
    assert bool(told) is (input_shape is None)
    assert batch["mask"].shape == (40, 8)
    if input_shape is not None:
        ids, masks = batch["collector", "traj_ids"], batch["mask"]
        for episode in ids.unique():
            assert len(masks[ids == episode].unique(dim=0)) == 1


def always(action: float) -> Seq:
    """A policy that chooses action 0 or 1, as its weights say."""
    linear = nn.Linear(4, 2)
    nn.init.zeros_(linear.weight)
    with torch.no_grad():
        linear.bias.copy_(torch.tensor([1 - action, action]))
    return Seq(
        Mod(linear, ["observation"], ["logits"]),
        Mod(lambda logits: torch.eye(2)[logits.argmax(-1)], ["logits"], ["action"]),
    )


def test_an_updater_of_the_users_needs_no_more_than_torchrl_asks_for() -> None:
    class Mine(dc.WeightUpdaterBase):
        def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any) -> None:
            self.collector.pipes[worker_id].send((server_weights, "update"))

        def _get_server_weights(self) -> Any:
            return TensorDict.from_module(always(1)).data

        def all_worker_ids(self) -> list[int]:
            return [1]

    updater = Mine()
    assert updater.collector is None
    with pytest.warns(UserWarning, match=r"Mine: its _sync_weights_with_worker\(\) is not"):
        collector = dc.MultiSyncCollector(
            [make_env, make_env], always(0), frames_per_batch=20, weight_updater=updater
        )
    with collector:
        assert updater.collector is collector
        assert collector.next()["action"].argmax(-1).sum() == 0
        push = collector.update_policy_weights_()
        assert push.worker_ids == (1,)
        assert collector.next()["action"].argmax(-1).sum(-1).tolist() == [0, 10]


def test_collectors_are_instances_of_torchrls_classes() -> None:
    with dc.Collector(make_env, frames_per_batch=10) as collector:
        assert isinstance(collector, theirs.Collector)
        assert not isinstance(collector, theirs.MultiCollector)
        assert collector.compiled_policy is collector.cudagraphed_policy is False
    with dc.MultiSyncCollector([make_env], frames_per_batch=10) as workers:
        assert isinstance(workers, theirs.MultiSyncCollector)
        assert isinstance(workers, theirs.MultiCollector)
        assert not isinstance(workers, theirs.Collector | theirs.MultiAsyncCollector)


@pytest.mark.skipif(not hasattr(torchrl, "service_backend"), reason="this TorchRL has none")
def test_a_context_of_torchrl_selects_the_collector() -> None:
    settings = {"frames_per_batch": 10, "total_frames": 10}
    with torchrl.service_backend("process"), dc.Collector(make_env, **settings) as collector:
        assert isinstance(collector, dc.MultiAsyncCollector)
        with dc.Collector(make_env, backend="direct", **settings) as inner:
            assert isinstance(inner, dc.Collector)
    wrong = pytest.raises(dc.ArgumentError, match=r"'thread' of an enclosing torchrl\.service_bac")
    with torchrl.service_backend("thread"), wrong:
        dc.Collector(make_env, **settings)


@pytest.mark.filterwarnings("ignore:Profiler won't be using warmup")
@pytest.mark.parametrize(  # 9: it is disabled before
    ("kind", "num_rollouts"), [(dc.Collector, 3), (dc.Collector, 9), (dc.MultiSyncCollector, 9)]
)
def test_the_first_rollouts_are_profiled_where_envs_are_stepped(
    kind: type[dc.DataCollectorBase], num_rollouts: int, tmp_path: Path
) -> None:
    def marks(batch: TensorDict) -> None:
        worker_id = int(batch["collector", "worker_id"].flatten()[0])
        (tmp_path / f"marked_{worker_id}").touch()

    settings: dict[str, Any] = {"frames_per_batch": 20, "post_collect_hook": marks}
    chosen = {"workers": [1], "save_path": tmp_path / "trace_{worker_idx}.json"}
    with kind([make_env, make_env], **settings) as collector:
        with pytest.raises(dc.ArgumentError, match="must be greater than warmup_rollouts"):
            collector.enable_profile(num_rollouts=1)
        assert collector.profile_config is None
        collector.enable_profile(num_rollouts=2, **chosen)
        collector.enable_profile(num_rollouts=num_rollouts, activities=None, **chosen)
        assert collector.profile_config.num_rollouts == num_rollouts
        for _ in range(3):
            collector.next()
        with pytest.raises(dc.CollectorStateError, match="Cannot enable profiling"):
            collector.enable_profile()
        collector.disable_profile()
        collector.disable_profile()
        assert collector.profile_config is None
        assert collector.post_collect_hook is marks
    [trace] = tmp_path.glob("trace_*")
    assert "cartpole.py" in trace.read_text()
    # Which worker was profiled, and the number of those that called the hook.
    expected = ("0", 1) if kind is dc.Collector else ("1", 2)
    assert (trace.name[6], len([*tmp_path.glob("marked_*")])) == expected


@pytest.mark.parametrize("name", ["rollout", "iterator"])
@pytest.mark.parametrize("base", [dc.Collector, dc.MultiSyncCollector, dc.DataCollectorBase])
def test_a_method_that_loops_would_not_call_is_refused(base: type, name: str) -> None:
    with pytest.raises(dc.DistCollectError, match=rf"class Mine: its {name}\(\)") as caught:
        type("Mine", (base,), {name: lambda self: None})
    assert isinstance(caught.value, TypeError)
    mixin = type("Mixin", (), {name: lambda self: None})
    with pytest.raises(dc.DistCollectError, match=rf"class Mine: its {name}\(\)"):
        type("Mine", (mixin, base), {})


class Marking(dc.Collector):
    def next(self, timeout_s: float | None = None) -> TensorDict:
        return super().next(timeout_s).set("marked", torch.ones(10))


def test_a_next_of_a_subclass_is_called_or_refused() -> None:
    with Marking(make_env, frames_per_batch=10, total_frames=20) as collector:
        assert all("marked" in batch for batch in collector)
    buffer = ReplayBuffer(storage=LazyTensorStorage(100))
    with (
        Marking(make_env, frames_per_batch=10, replay_buffer=buffer) as collector,
        pytest.raises(dc.CollectorStateError, match=r"Marking has a next\(\) of its own"),
    ):
        collector.start()
