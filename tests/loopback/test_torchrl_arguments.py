"""TorchRL's arguments for collectors with workers."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from helpers.counting_envs import CountingMaker
from helpers.envs import SamplingEnv
from helpers.loopback_pool import loopback_collector
from helpers.policies import ShownWeight as Policy
from helpers.replay_buffers import KeepingBuffer
from helpers.waiting import eventually
from tensordict import TensorDict
from tensordict.nn import TensorDictModule as Mod
from torch import nn

import distcollect as dc
from distcollect.common import peer_ids

T = 64


# Workers unpickle functions by value: what these write to must be found by its module.
CALLS: list[Any] = []


def called(value: Any) -> None:
    from test_torchrl_arguments import CALLS  # noqa: PLC0415

    CALLS.append(value)


def before() -> None:
    called("before")


def started() -> None:
    called("started")


@pytest.fixture(autouse=True)
def _no_calls() -> None:
    CALLS.clear()


def test_hooks_and_init_fn_are_called_in_the_workers() -> None:
    """A hook gets a copy, although a worker writes to the memory of each rollout again."""
    with loopback_collector(
        CountingMaker(),
        num_workers=1,
        sync=True,
        frames_per_batch=T,
        total_frames=4 * T,
        init_fn=started,
        pre_collect_hook=before,
        post_collect_hook=called,
    ) as collector:
        batches = list(collector)
        with pytest.raises(dc.CollectorStateError, match="set_seed"):
            collector.reset()
    assert [call for call in CALLS if isinstance(call, str)] == ["started"] + ["before"] * 4
    seen = [call for call in CALLS if isinstance(call, TensorDict)]
    for rollout, batch in zip(seen, batches, strict=True):
        assert torch.equal(rollout["observation"], batch["observation"])


def test_hooks_can_be_set_later() -> None:
    with loopback_collector(
        SamplingEnv, num_workers=2, sync=True, frames_per_batch=4, pre_collect_hook=started
    ) as collector:
        collector.next()
        assert CALLS == ["started"] * 2
        CALLS.clear()
        collector.pre_collect_hook, collector.post_collect_hook = None, called
        collector.next()
        assert collector.post_collect_hook is called
        with pytest.raises(dc.ArgumentTypeError, match="pre_collect_hook=5: must be a function"):
            collector.pre_collect_hook = 5  # type: ignore[assignment]
        lock = threading.Lock()
        with pytest.raises(dc.ArgumentError, match="hook can't be sent to workers"):
            collector.pre_collect_hook = partial(called, lock)
        assert collector.pre_collect_hook is None
    assert [call.shape for call in CALLS] == [(1, 2)] * 2


def factory(weight: float) -> Callable[[], Policy]:
    return lambda: Policy(weight)


def test_each_worker_has_a_policy_factory_and_weights_of_its_own() -> None:
    with loopback_collector(
        [SamplingEnv] * 3,
        policy_factory=[factory(1.0), factory(2.0), factory(3.0)],
        sync=True,
        frames_per_batch=6,
    ) as collector:

        def weights() -> list[float]:
            return collector.next()["weight"][:, 0].tolist()

        assert weights() == [1, 2, 3]
        collector.update_policy_weights_(
            {0: Policy(10.0).state_dict(), 2: Policy(30.0).state_dict()}
        )
        assert weights() == [10, 2, 30]
        assert collector.policy_version == 2
    with pytest.raises(dc.ArgumentError, match="policy_factory has 2 factories for 3 worker"):
        loopback_collector([SamplingEnv] * 3, policy_factory=[Policy] * 2, frames_per_batch=6)


class Numbered(SamplingEnv):
    """An env with attributes to read."""

    size = 7

    def plus(self, value: int, times: int = 1) -> int:
        """Calculate something."""
        return self.size + value * times


class TestTorchRLsNamesOfWorkers:
    def test_what_can_be_read_of_workers(self) -> None:
        buffer = KeepingBuffer()
        with loopback_collector(
            Numbered, num_workers=2, sync=True, frames_per_batch=8, replay_buffer=buffer
        ) as collector:
            assert collector.get_distant_attr("worker_idx") == [0, 1]
            assert collector.get_distant_attr("env.size") == [7, 7]
            assert collector.get_distant_attr("frames_per_batch") == [4, 4]
            assert collector.get_distant_attr("replay_buffer.shapes") == [[], []]
            names = [("worker_idx",), ("env.size",)]
            assert collector.map_fn("get_distant_attr", list_of_args=names) == [0, 7]
            times = [{"times": 2}, {}]
            assert collector.map_fn("env.plus", [(1,), (2,)], times) == [9, 9]

    def test_errors(self) -> None:
        with loopback_collector(Numbered, num_workers=2, frames_per_batch=4) as collector:
            with pytest.raises(ValueError, match="Expected 2 argument entries in list_of_args"):
                collector.map_fn("env.plus", [(1,)])
            for name in ("policy", "env", "replay_buffer.size", "_frames"):
                with pytest.raises(dc.ArgumentError, match=f"'{name}': workers step envs"):
                    collector.get_distant_attr(name)
            with pytest.raises(NotImplementedError, match="fake_tensordict"):
                collector.fake_tensordict()


@pytest.mark.parametrize("cat_results", [0, -1, "stack"])
@pytest.mark.parametrize("envs_per_worker", [1, 2])
def test_a_buffer_with_rows_gets_one_for_each_env_of_all_workers(
    cat_results: Any, envs_per_worker: int
) -> None:
    buffer = KeepingBuffer(ndim=2)
    with loopback_collector(
        SamplingEnv,
        num_workers=2,
        envs_per_worker=envs_per_worker,
        sync=True,
        frames_per_batch=8 * envs_per_worker,
        cat_results=cat_results,
        replay_buffer=buffer,
    ) as collector:
        assert collector.next() is None
    assert buffer.shapes == [(2 * envs_per_worker, 4)]
    workers = buffer.added[0]["collector", "worker_id"]
    assert workers.tolist() == [[each] * 4 for each in (0, 1) for _ in range(envs_per_worker)]


@pytest.mark.parametrize("name", ["extend_buffer", "replay_buffer_chunk"])
@pytest.mark.parametrize("cat_results", [0, "stack"])
def test_a_buffer_gets_single_steps(name: str, cat_results: Any) -> None:
    added = {}
    for by_frame in (True, False):
        buffer = KeepingBuffer()
        with loopback_collector(
            CountingMaker(),
            num_workers=2,
            envs_per_worker=3,
            sync=True,
            frames_per_batch=24,
            cat_results=cat_results,
            replay_buffer=buffer,
            **{name: by_frame},
        ) as collector:
            assert collector.next() is None
        added[by_frame] = buffer.added
    [frames] = added[True]
    assert frames.shape == (24,)
    [steps] = added[False]
    assert steps.shape == (8, 3)
    rows = steps["observation"].unflatten(0, (2, 4)).transpose(1, 2).flatten(0, 2)
    seen = slice(3)  # row, episode and step; the rest depends on the actions
    assert torch.equal(rows[:, seen], frames["observation"][:, seen])


def test_frames_of_torchrls_envs_are_rounded_up() -> None:
    pytest.importorskip("torchrl", reason="the torchrl extra is not installed")
    from helpers.torchrl_envs import Counter  # noqa: PLC0415

    settings = {"num_workers": 2, "sync": True, "frames_per_batch": 9, "total_frames": 18}
    with pytest.warns(UserWarning, match=r"frames_per_batch=9 is no multiple of 2.*10 frames"):
        collector = loopback_collector(Counter, **settings)
    with collector:
        assert (collector.requested_frames_per_batch, collector.frames_per_batch) == (9, 10)
        assert [batch.numel() for batch in collector] == [10, 10]
        assert len(collector) == 2


@pytest.mark.parametrize("publishes", [True, False])
@pytest.mark.parametrize("sync", [True, False])
def test_a_state_has_the_weights(
    monkeypatch: pytest.MonkeyPatch, sync: bool, publishes: bool
) -> None:
    """If they were not published, loading them needs a version above the state's 0."""
    # The ids of later tests begin as if no state had been loaded.
    monkeypatch.setattr(peer_ids, "_identity", peer_ids.Identity("run"))
    pytest.importorskip("torchrl", reason="the torchrl extra is not installed")
    from helpers import torchrl_envs as zoo  # noqa: PLC0415

    sizes = {"num_workers": 2, "sync": sync, "frames_per_batch": 8}
    policy = Mod(nn.Linear(3, 1), in_keys=["observation"], out_keys=["action"])
    other = copy.deepcopy(policy)
    for parameter in other.parameters():
        parameter.data.zero_()
    with loopback_collector(zoo.pendulum, policy, **sizes) as collector:
        collector.set_seed(3)
        if publishes:
            collector.update_policy_weights_()
        state = copy.deepcopy(collector.state_dict())
    for name in ("worker0", "worker1"):
        assert state[name]["policy_version"] == publishes
        for key, value in policy.state_dict().items():
            assert torch.equal(state[name]["policy_state_dict"][key], value)
    with loopback_collector(zoo.pendulum, other, **sizes) as collector:
        collector.load_state_dict(state)
        version = collector.policy_version
        assert version == 1
        batch = collector.next()
        assert (batch["collector", "policy_version"] == version).all()
        with torch.no_grad():
            assert torch.allclose(batch["action"], policy(batch.select("observation"))["action"])
        for parameter in other.parameters():
            parameter.data.fill_(2)
        collector.update_policy_weights_()
        assert collector.policy_version == version + 1
        eventually(lambda: collector.next()["collector", "policy_version"].min() == version + 1)
