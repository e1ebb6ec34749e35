"""Policies in workers: on one GPU together, on one each, in graphs, compiled, in forks."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from helpers.gpu_policies import Sampling, Where, collect, gpu_files
from tensordict.nn import CudaGraphModule, TensorDictModule
from torch import nn

import distcollect as dc
from distcollect.launch import zygote

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers can't import test modules


def processes(collector: dc.RPCDataCollector) -> list[dict[str, Any]]:
    """What each worker has of the GPU."""
    return [of_env for of_worker in collector.call("process").values() for of_env in of_worker]


def agree(batch: Any, value: float, device: torch.device) -> None:
    """Check that all weights had ``value`` in each frame, and where they were."""
    assert (batch["lowest"] == value).all()
    assert (batch["highest"] == value).all()
    assert (batch["gpu"] >= 0).all() == (device.type == "cuda")


def push_and_collect(collector: dc.RPCDataCollector, device: torch.device) -> None:
    agree(collector.next(), 0, device)
    for version in (1, 2, 3, 4):
        handle = collector.update_policy_weights_(Where(version).to(device))
        assert handle is not None
        assert not handle.left_out
        batch = collector.next()
        assert (batch["collector", "policy_version"] == version).all()
        agree(batch, version, device)


class TestPlaces:
    def test_several_workers_share_a_gpu(self, device: torch.device) -> None:
        with collect(Where().to(device)) as collector:
            push_and_collect(collector, device)

    @pytest.mark.long
    def test_each_worker_has_one(self, device: torch.device) -> None:
        """Where there is one GPU only, each names it by its number."""
        num_gpus = max(1, torch.cuda.device_count()) if device.type == "cuda" else 0
        named = [f"cuda:{w % num_gpus}" if num_gpus else "cpu" for w in range(2)]
        policy = Where().to(device)
        with collect(policy, policy_device=named) as collector:
            push_and_collect(collector, device)
            batch = collector.next()
            for row, name in enumerate(named):
                index = torch.device(name).index
                assert (batch["gpu"][row] == (-1 if index is None else index)).all()
            current = [worker["current"] for worker in processes(collector)]
            assert current == [torch.device(name).index for name in named]

    @pytest.mark.long
    def test_in_this_process(self, device: torch.device) -> None:
        policy = Where().to(device)
        with dc.SyncDataCollector("CartPole-v1", policy, frames_per_batch=8) as collector:
            for value in (0, 1, 2):
                policy.fill(value)
                batch = collector.next()
                assert (batch["lowest"] == value).all()

    @pytest.mark.long
    @pytest.mark.parametrize("env_too", [True, False])
    def test_a_torchrl_env(self, device: torch.device, env_too: bool) -> None:
        """On the same device as the policy, or on the CPU."""
        policy = TensorDictModule(nn.Linear(4, 2), ["observation"], ["action"]).to(device)
        settings: dict[str, Any] = {"device": str(device)} if env_too else {}
        with collect(
            policy,
            create_env_fn=partial(_torchrl_env, str(device) if env_too else "cpu"),
            storing_device=str(device),
            **settings,
        ) as collector:
            for version in range(3):
                batch = collector.next()
                assert batch["observation"].device.type == device.type
                assert (batch["collector", "policy_version"] == version).all()
                ends = batch["next", "done"][..., :-1, 0]
                following = batch["observation"][..., 1:, :]
                assert (batch["next", "observation"][..., :-1, :] == following)[~ends].all()
                collector.update_policy_weights_(policy)

    @pytest.mark.long
    def test_a_recurrent_policy(self, device: torch.device) -> None:
        with collect(Remembering().to(device)) as collector:
            batch = torch.cat([collector.next(), collector.next()], 1)
        first = batch["collector", "traj_ids"][:, :1] == batch["collector", "traj_ids"]
        counted = torch.arange(1, batch.shape[1] + 1).expand(batch.shape)
        assert (batch["seen"][first] == counted[first]).all()


def _torchrl_env(device: str) -> Any:
    from torchrl.envs import GymEnv  # noqa: PLC0415

    return GymEnv("CartPole-v1", device=device)


class Remembering(nn.Module):
    """Counts the frames of an episode in its state."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.ones(1))

    def initial_state(self, num_envs: int) -> dict[str, torch.Tensor]:
        return {"seen_before": torch.zeros(num_envs, 1, device=self.one.device)}

    def forward(self, observation: torch.Tensor, seen_before: torch.Tensor) -> Any:
        seen = seen_before + self.one
        action = torch.zeros(len(observation), dtype=torch.int64, device=self.one.device)
        return action, {"seen_before": seen, "seen": seen[:, 0]}


class TestForks:
    @pytest.mark.long
    def test_what_is_forked_has_no_context_of_its_own_before(self, device: torch.device) -> None:
        """This process uses the GPU; the one that it has workers forked from does not."""
        torch.zeros(1, device=device)
        with collect(Where().to(device)) as collector:
            collector.next()
            workers = processes(collector)
            forking = zygote.pid()
            assert forking is not None, "workers are not forked; the log says why"
            assert gpu_files(forking) == 0
            assert [path.name for path in Path(f"/proc/{forking}/task").iterdir()] == [str(forking)]
            on_gpu = device.type == "cuda"
            assert [worker["has_context"] for worker in workers] == [on_gpu] * 2

    @pytest.mark.long
    def test_workers_on_cpus_leave_the_gpu_alone(self, device: torch.device) -> None:
        with collect(Where().to(device), policy_device="cpu") as collector:
            push_and_collect_on_cpu(collector, device)
            for worker in processes(collector):
                assert not worker["has_context"]
                assert not worker["gpu_files"]


def push_and_collect_on_cpu(collector: dc.RPCDataCollector, device: torch.device) -> None:
    for version in (1, 2):
        collector.update_policy_weights_(Where(version).to(device))
        agree(collector.next(), version, torch.device("cpu"))


class TestCompiled:
    @pytest.mark.long
    def test_a_compiled_policy(self, device: torch.device) -> None:
        backend = "inductor" if device.type == "cuda" else "aot_eager"
        make = partial(_compiled, str(device), backend=backend)
        with collect(None, 1, policy_factory=make) as collector:
            push_and_collect(collector, device)

    @pytest.mark.long
    def test_one_compiled_with_graphs(self, gpu: torch.device) -> None:
        make = partial(_compiled, str(gpu), mode="reduce-overhead")
        with collect(None, 1, policy_factory=make) as collector:
            push_and_collect(collector, gpu)

    @pytest.mark.long
    def test_tensordict_s_graphs(self, device: torch.device) -> None:
        with collect(None, policy_factory=partial(_in_graph, str(device), Where)) as collector:
            push_and_collect(collector, device)

    @pytest.mark.long
    def test_a_seeded_policy_in_a_graph_draws_other_numbers_each_time(
        self, gpu: torch.device
    ) -> None:
        make = partial(_in_graph, str(gpu), Sampling)
        with collect(None, policy_factory=make, frames_per_batch=400) as collector:
            collector.set_seed(0)
            for _ in range(2):
                chosen = collector.next()["action"].double()
                assert 0.2 < chosen.mean() < 0.8


def _compiled(device: str, **kwargs: Any) -> Any:
    return torch.compile(Where().to(device), **kwargs)


def _in_graph(device: str, kind: type[nn.Module]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # without a GPU it calls the policy as it is
        return CudaGraphModule(kind().to(device))


@pytest.mark.long
def test_weights_that_arrive_while_a_policy_computes(device: torch.device) -> None:
    """Asynchronously, as fast as they come: no frame has weights of two versions."""
    policy = Where(num_floats=1 << 20).to(device)
    with collect(policy, sync=False, frames_per_batch=8) as collector:
        stop = threading.Event()
        sender = threading.Thread(target=_push_until, args=(collector, policy, stop))
        batch = collector.next()
        sender.start()
        try:
            for _ in range(100):
                batch = collector.next()
                versions = batch["collector", "policy_version"]
                assert (batch["lowest"] == versions).all()
                assert (batch["highest"] == versions).all()
        finally:
            stop.set()
            sender.join(60)
    assert batch["collector", "policy_version"].max() > 1


def _push_until(collector: dc.RPCDataCollector, policy: Where, stop: threading.Event) -> None:
    version = 0
    push: Callable[..., Any] = collector.update_policy_weights_
    while not stop.is_set():
        version += 1
        push(policy.fill(version))
