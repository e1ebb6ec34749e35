"""TorchRL's collectors, set up as its manual says, without costly options.

``GymWrapper`` around the same env (categorical actions), ``SerialEnv`` for n > 1, the same policy
as a ``TensorDictModule`` that writes "action" and "action_log_prob"; the collector stores ``next``
observations and trajectory ids, as always. They are not shut down, which may hang: their processes
are killed anyway. TorchRL is imported when it is needed.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from benchmarks.items import Values
from benchmarks.windows import Batch, frames_per_s
from benchmarks.workloads import WORKLOADS, Workload

ENDLESS = 10**12  # TorchRL's RPCCollector yields nothing with -1, its own value for endless


class _Acting(nn.Module):
    """Returns the policy's log-probability as a second output, as a TensorDictModule needs it."""

    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        action, written = self.policy(observation)
        return action, written["action_log_prob"]


class EnvMaker:
    """Makes the env of one TorchRL worker; can be pickled."""

    def __init__(self, workload: Workload) -> None:
        self._make_env = workload.make_env
        self._num_envs = workload.num_envs

    def _one(self) -> Any:
        gym_module = importlib.import_module("torchrl.envs.libs.gym")
        return gym_module.GymWrapper(self._make_env(), categorical_action_encoding=True)

    def __call__(self) -> Any:
        if self._num_envs == 1:
            return self._one()
        return importlib.import_module("torchrl.envs").SerialEnv(self._num_envs, self._one)


def make_torchrl(kind: str, workload: Workload, num_workers: int, **options: Any) -> Any:
    """An endless collector of TorchRL; ``num_workers``: 0 for one that steps in this process."""
    module = "torchrl.collectors.distributed" if kind == "RPCCollector" else "torchrl.collectors"
    maker = EnvMaker(workload)
    policy = importlib.import_module("tensordict.nn").TensorDictModule(
        _Acting(workload.make_policy()),
        in_keys=["observation"],
        out_keys=["action", "action_log_prob"],
    )
    given = {"frames_per_batch": workload.rollout_frames, "total_frames": ENDLESS, **options}
    return getattr(importlib.import_module(module), kind)(
        [maker] * num_workers if num_workers else maker(), policy, **given
    )


def counted(collector: Any) -> Iterator[Batch]:
    """The frames of each batch."""
    for batch in collector:
        yield 0, batch.numel()


def run_torchrl(seconds: float, *, name: str) -> Values:
    """``Collector``, which steps in this process."""
    torch.set_num_threads(1)
    collector = make_torchrl("Collector", WORKLOADS[name], 0)
    return {"frames_per_s": frames_per_s(counted(collector), seconds)}


def run_torchrl_rpc(seconds: float, *, name: str) -> Values:
    """``RPCCollector`` with two workers."""
    collector = make_torchrl("RPCCollector", WORKLOADS[name], 2, launcher="mp", sync=False)
    return {"frames_per_s": frames_per_s(counted(collector), seconds)}
