"""The collectors beside TorchRL's own: the same TorchRL env, the same policy.

SyncDataCollector and TorchRL's ``Collector`` collect in one process, a batch each in turn. Both are
made with the arguments that they need, and no others. CPU time is that of this process and of all
that it started. This module imports torchrl.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.envs import GymEnv, ParallelEnv, SerialEnv

from benchmarks.alternating import in_turn
from benchmarks.items import Values
from benchmarks.peers import ENDLESS
from benchmarks.windows import cpu_s
from benchmarks.workloads import mlp
from distcollect import RPCDataCollector, SyncDataCollector

TorchRLEnv: TypeAlias = Any  # torchrl has no types

_NUM_WORKERS = 2
_WARM_UP_BATCHES = 6


class Kind(NamedTuple):
    """Makers of an env and a policy, and the number of frames in a batch."""

    make_env: Callable[[], TorchRLEnv]
    make_policy: Callable[[], Any]
    num_frames: int = 256


make_cartpole = partial(GymEnv, "CartPole-v1")  # actions one-hot, as is TorchRL's default
make_pendulum = partial(GymEnv, "Pendulum-v1")


def pendulum_policy() -> TensorDictModule:
    """A network of two layers."""
    return TensorDictModule(mlp(3, 1), in_keys=["observation"], out_keys=["action"])


def cartpole_policy() -> TensorDictModule:
    """A network of two layers, one-hot actions."""

    class Greedy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp(4, 2)

        def forward(self, observation: torch.Tensor) -> torch.Tensor:
            return nn.functional.one_hot(self.body(observation).argmax(-1), 2)

    return TensorDictModule(Greedy(), in_keys=["observation"], out_keys=["action"])


# By the names that items.py lists.
KINDS: dict[str, Callable[[], Kind]] = {
    "cartpole": lambda: Kind(make_cartpole, cartpole_policy),
    "pendulum": lambda: Kind(make_pendulum, pendulum_policy),
    "serial": lambda: Kind(lambda: SerialEnv(4, make_pendulum), pendulum_policy, 512),
    "parallel": lambda: Kind(lambda: ParallelEnv(2, make_pendulum), pendulum_policy),
}


def run_beside(seconds: float, *, name: str) -> Values:
    """Frames per second of CPU time, and of wall time, over those of TorchRL's ``Collector``."""
    torch.set_num_threads(1)
    kind = KINDS[name]()
    theirs = Collector(
        kind.make_env(), kind.make_policy(), frames_per_batch=kind.num_frames, total_frames=-1
    )
    ours = SyncDataCollector(kind.make_env(), kind.make_policy(), frames_per_batch=kind.num_frames)
    batches = iter(theirs)
    clocks = {"cpu": cpu_s, "speed": time.perf_counter}
    found = in_turn(lambda: next(batches), ours.next, seconds, **clocks)
    ours.shutdown()
    theirs.shutdown()
    return found


def run_workers(seconds: float, *, torchrl: bool = False) -> Values:
    """Two workers over RPC with Pendulum-v1: RPCDataCollector, or TorchRL's RPCCollector."""
    kind = KINDS["pendulum"]()
    options: dict[str, Any] = {"frames_per_batch": kind.num_frames, "sync": False}
    collector: Any
    if torchrl:
        collector = importlib.import_module("torchrl.collectors.distributed").RPCCollector(
            [kind.make_env] * _NUM_WORKERS,
            kind.make_policy(),
            total_frames=ENDLESS,
            launcher="mp",
            **options,
        )
    else:
        collector = RPCDataCollector(
            kind.make_env, kind.make_policy(), num_workers=_NUM_WORKERS, **options
        )
    batches = iter(collector)
    for _ in range(_WARM_UP_BATCHES):
        next(batches)
    num_frames, begin, cpu_begin = 0, time.perf_counter(), cpu_s()
    while time.perf_counter() - begin < seconds:
        num_frames += next(batches).numel()
    return {
        "frames_per_s": num_frames / (time.perf_counter() - begin),
        "frames_per_cpu_s": num_frames / (cpu_s() - cpu_begin),
    }
