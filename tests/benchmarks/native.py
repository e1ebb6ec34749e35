"""Native vector envs: our collectors beside a bare loop over the same vector env.

The bare loop calls the policy and steps the env, and writes observation, action, log-probability,
reward, terminated and truncated into preallocated arrays. An env that resets a row in the step
after its end makes filler steps. The bare loop leaves them in, and each of them counts as one of
its frames; the collector delivers none.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from torch import nn

import distcollect as dc
from benchmarks.alternating import in_turn
from benchmarks.contenders import counted
from benchmarks.items import Values
from benchmarks.uneven_pool import UnevenPool
from benchmarks.vector_loops import AsyncPoolLoop, VectorLoop
from benchmarks.windows import frames_per_s
from benchmarks.workloads import GaussianPolicy, cnn_policy, small_policy
from distcollect.envs.vector_ids import vector_maker


class _Native(NamedTuple):
    """A vector env of n envs, a policy for it, and T."""

    env_id: str
    make_policy: Callable[[], nn.Module]
    num_envs: int
    num_steps: int

    def make_env(self) -> Any:
        kind, _, name = self.env_id.partition(":")
        if kind == "gymnasium":
            return gym.make_vec(name, self.num_envs, vectorization_mode="vector_entry_point")
        return vector_maker(self.env_id, self.num_envs)()


_PONG = partial(cnn_policy, 6)

NATIVE = {
    "envpool-cartpole-16": _Native("envpool:CartPole-v1", small_policy, 16, 256),
    "envpool-cartpole-256": _Native("envpool:CartPole-v1", small_policy, 256, 64),
    "envpool-cartpole-1024": _Native("envpool:CartPole-v1", small_policy, 1024, 64),
    "envpool-pong": _Native("envpool:Pong-v5", _PONG, 8, 64),
    "envpool-cheetah": _Native("envpool:HalfCheetah-v4", partial(GaussianPolicy, 17, 6), 16, 128),
    "envpool-ant": _Native("envpool:Ant-v5", partial(GaussianPolicy, 105, 8), 16, 128),
    "ale-pong": _Native("ale:Pong", _PONG, 8, 64),
    "gymnasium-cartpole-16": _Native("gymnasium:CartPole-v1", small_policy, 16, 256),
}


def run_beside_loop(seconds: float, *, name: str) -> Values:
    """Frames/s of SyncDataCollector over the bare loop's."""
    torch.set_num_threads(1)
    native = NATIVE[name]
    policy = native.make_policy()
    num_frames = native.num_envs * native.num_steps
    bare = VectorLoop(native.make_env(), policy, native.num_steps)
    with _collector(dc.SyncDataCollector, native.make_env(), policy, num_frames) as ours:
        return in_turn(bare.next, ours.next, seconds, speed=time.perf_counter)


def _collector(kind: Any, make_env: Any, policy: nn.Module, num_frames: int) -> Any:
    monitor = dc.Monitor(view=False)
    return kind(make_env, policy, frames_per_batch=num_frames, monitor=monitor)


_NUM_UNEVEN, _NUM_READY, _UNEVEN_STEPS, _MEAN_S = 16, 4, 64, 0.005


def make_uneven(num_ready: int = _NUM_READY) -> Any:
    """EnvPool's CartPole, whose steps take 5 ms on average, exponentially distributed."""
    pool = importlib.import_module("envpool").make_gymnasium(
        "CartPole-v1", num_envs=_NUM_UNEVEN, num_threads=1, batch_size=num_ready
    )
    rng = np.random.default_rng(0)
    UnevenPool(pool, lambda _: rng.exponential(_MEAN_S))
    return pool


def run_uneven_loop(seconds: float) -> Values:
    """A bare loop over EnvPool's asynchronous mode."""
    torch.set_num_threads(1)
    loop = AsyncPoolLoop(make_uneven(), small_policy(), _UNEVEN_STEPS)
    return {"frames_per_s": frames_per_s(loop.batches(), seconds)}


def run_uneven(seconds: float, *, at_once: bool = False) -> Values:
    """A collector over EnvPool's asynchronous mode; ``at_once``: over its synchronous one."""
    make_env = partial(make_uneven, _NUM_UNEVEN) if at_once else make_uneven
    num_frames = _NUM_UNEVEN * _UNEVEN_STEPS
    with _collector(dc.aSyncDataCollector, make_env, small_policy(), num_frames) as collector:
        return {"frames_per_s": frames_per_s(counted(collector), seconds)}
