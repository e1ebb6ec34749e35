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
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import Bounded, Categorical, Composite, Unbounded
from torchrl.envs import (
    Compose,
    DoubleToFloat,
    EnvBase,
    GymEnv,
    InitTracker,
    ObservationNorm,
    ParallelEnv,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
)
from torchrl.modules import GRUModule, LSTMModule

from benchmarks.alternating import ratios_of_pairs
from benchmarks.items import Values
from benchmarks.peers import ENDLESS
from benchmarks.windows import cpu_s
from benchmarks.workloads import mlp
from distcollect import RPCDataCollector, SyncDataCollector

TorchRLEnv: TypeAlias = Any  # torchrl has no types

_HIDDEN = 32
_BATCH = 16
_AGENTS = 3
_EPISODE = 100  # frames
_NUM_WORKERS = 2
_WARM_UP_BATCHES = 6


class Kind(NamedTuple):
    """Makers of an env and a policy, and the number of frames in a batch."""

    make_env: Callable[[], TorchRLEnv]
    make_policy: Callable[[], Any]
    num_frames: int = 256


class Swarm(EnvBase):  # type: ignore[misc]
    """16 copies of a simulation with three agents, whose entries are in a group of their own."""

    def __init__(self) -> None:
        super().__init__(batch_size=(_BATCH,))
        rows, agents = (_BATCH,), (_BATCH, _AGENTS)
        self.observation_spec = Composite(
            agents=Composite(observation=Unbounded((*agents, 6)), shape=agents), shape=rows
        )
        self.action_spec = Composite(
            agents=Composite(action=Bounded(-1, 1, (*agents, 2)), shape=agents), shape=rows
        )
        self.reward_spec = Composite(
            agents=Composite(reward=Unbounded((*agents, 1)), shape=agents), shape=rows
        )
        flag = Categorical(2, (*rows, 1), dtype=torch.bool)
        self.full_done_spec = Composite(done=flag, terminated=flag.clone(), shape=rows)
        self._count = torch.zeros(*rows, 1, dtype=torch.int64)
        self._place = torch.zeros(*agents, 6)

    def _reset(self, tensordict: TensorDictBase | None, **kwargs: Any) -> TensorDictBase:
        begins = None if tensordict is None else tensordict.get("_reset", None)
        if begins is None:
            # Rows end at different steps.
            self._count = torch.arange(_BATCH).unsqueeze(-1) * _EPISODE // _BATCH
            self._place = torch.zeros_like(self._place)
        else:
            self._count = self._count.masked_fill(begins, 0)
            self._place = self._place.masked_fill(begins.unsqueeze(-1), 0.0)
        agents = TensorDict({"observation": self._place}, (_BATCH, _AGENTS))
        return TensorDict({"agents": agents}, (_BATCH,))

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        action = tensordict.get(("agents", "action"))
        self._count = self._count + 1
        self._place = self._place + action.repeat(1, 1, 3)
        over = self._count >= _EPISODE
        agents = {"observation": self._place, "reward": action.sum(-1, keepdim=True)}
        return TensorDict(
            {
                "agents": TensorDict(agents, (_BATCH, _AGENTS)),
                "done": over,
                "terminated": over.clone(),
            },
            (_BATCH,),
        )

    def _set_seed(self, seed: int | None) -> None:
        """Nothing here is random."""


class Constant:
    """A policy that costs next to nothing: the same action each time."""

    def __init__(self, key: Any, action: torch.Tensor) -> None:
        self._key = key
        self._action = action

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the action."""
        return tensordict.set(self._key, self._action)


make_cartpole = partial(GymEnv, "CartPole-v1")  # actions one-hot, as is TorchRL's default
make_pendulum = partial(GymEnv, "Pendulum-v1")


def make_transformed() -> TorchRLEnv:
    """Pendulum-v1 with the usual transforms."""
    transforms = (
        StepCounter(),
        RewardSum(),
        DoubleToFloat(),
        InitTracker(),
        ObservationNorm(loc=0.0, scale=1.0, in_keys=["observation"]),
    )
    return TransformedEnv(make_pendulum(), Compose(*transforms))


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


def swarm_policy() -> TensorDictModule:
    """A network of two layers for every agent."""
    return TensorDictModule(
        mlp(6, 2), in_keys=[("agents", "observation")], out_keys=[("agents", "action")]
    )


def _remembering(make: Callable[..., Any]) -> Kind:
    """Pendulum-v1 with a recurrent policy, as TorchRL's manual has it."""
    cell = make(input_size=3, hidden_size=_HIDDEN, in_key="observation", out_key="features")
    head = TensorDictModule(nn.Linear(_HIDDEN, 1), in_keys=["features"], out_keys=["action"])

    def make_env() -> TorchRLEnv:
        return TransformedEnv(
            make_pendulum(), Compose(InitTracker(), cell.make_tensordict_primer())
        )

    return Kind(make_env, lambda: TensorDictSequential(cell, head))


# By the names that items.py lists.
KINDS: dict[str, Callable[[], Kind]] = {
    "cartpole": lambda: Kind(make_cartpole, cartpole_policy),
    "pendulum": lambda: Kind(make_pendulum, pendulum_policy),
    "serial": lambda: Kind(lambda: SerialEnv(4, make_pendulum), pendulum_policy, 512),
    "parallel": lambda: Kind(lambda: ParallelEnv(2, make_pendulum), pendulum_policy),
    "transformed": lambda: Kind(make_transformed, pendulum_policy),
    "batched": lambda: Kind(Swarm, swarm_policy, 128 * _BATCH),
    "gru": lambda: _remembering(GRUModule),
    "lstm": lambda: _remembering(LSTMModule),
    "cartpole-cheap": lambda: Kind(make_cartpole, lambda: Constant("action", torch.tensor([0, 1]))),
    "pendulum-cheap": lambda: Kind(make_pendulum, lambda: Constant("action", torch.zeros(1))),
    "batched-cheap": lambda: Kind(
        Swarm,
        lambda: Constant(("agents", "action"), torch.zeros(_BATCH, _AGENTS, 2)),
        128 * _BATCH,
    ),
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
    (cpu, wall), pairs = ratios_of_pairs(
        lambda: next(batches), ours.next, seconds, clocks=(cpu_s, time.perf_counter)
    )
    ours.shutdown()
    theirs.shutdown()
    return {"cpu_ratio": cpu, "speed_ratio": wall, "pairs": pairs}


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
