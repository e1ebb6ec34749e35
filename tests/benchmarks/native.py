"""Native vector envs: our collectors beside a bare loop over the same vector env.

The bare loop calls the policy and steps the env, and writes observation, action, log-probability,
reward, terminated and truncated into preallocated arrays. An env that resets a row in the step
after its end makes filler steps. The bare loop leaves them in, and each of them counts as one of
its frames, but not in "real_ratio"; the collector delivers none.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import nn

from benchmarks.alternating import ratio_of_pairs
from benchmarks.bare import side_by_side
from benchmarks.contenders import Values
from benchmarks.uneven_pool import UnevenPool
from benchmarks.vector_loops import AsyncPoolLoop, VectorLoop
from benchmarks.windows import Batch, frames_per_s
from benchmarks.workloads import (
    GaussianPolicy,
    cheetah_policy,
    cnn_policy,
    small_policy,
)
from distcollect import (
    Monitor,
    MultiaSyncDataCollector,
    SyncDataCollector,
    aSyncDataCollector,
)
from distcollect.envs.vector_ids import VectorMaker, vector_maker

_NUM_WORKERS = 2


@dataclass(frozen=True)
class NativeWorkload:
    """A vector env, and a policy for it.

    Attributes:
        about: a description for the report.
        env_id: the env's id; "gymnasium:..." for a native vector env of Gymnasium.
        make_policy: makes the policy.
        num_envs: n.
        num_steps: T.
        needs: modules that must be installed.
        batch_size: EnvPool gives the results of so many envs at a time; None: of all.
        uneven_s: the mean duration of a step in seconds, exponentially distributed; None: the
            envs are as fast as they are.
    """

    about: str
    env_id: str
    make_policy: Callable[[], nn.Module]
    num_envs: int
    num_steps: int
    needs: tuple[str, ...]
    batch_size: int | None = None
    uneven_s: float | None = None

    def make_env(self) -> Any:
        """Make the vector env."""
        if self.uneven_s is not None:
            return _make_uneven(self, self.uneven_s)
        maker = vector_maker(self.env_id, self.num_envs)
        if isinstance(maker, VectorMaker):
            return maker()
        name = self.env_id.removeprefix("gymnasium:")
        return gym.make_vec(name, self.num_envs, vectorization_mode="vector_entry_point")


def _make_uneven(workload: NativeWorkload, mean_s: float) -> Any:
    pool = importlib.import_module("envpool").make_gymnasium(
        workload.env_id.removeprefix("envpool:"),
        num_envs=workload.num_envs,
        num_threads=1,
        batch_size=workload.batch_size or workload.num_envs,
    )
    rng = np.random.default_rng(0)
    UnevenPool(pool, lambda _: rng.exponential(mean_s))
    return pool


def _envpool(
    name: str, make_policy: Callable[[], nn.Module], num_envs: int, num_steps: int
) -> NativeWorkload:
    about = f"EnvPool's {name}, {num_envs} envs"
    return NativeWorkload(about, f"envpool:{name}", make_policy, num_envs, num_steps, ("envpool",))


_PONG = partial(cnn_policy, 6)

NATIVE: dict[str, NativeWorkload] = {
    "envpool-cartpole-16": _envpool("CartPole-v1", small_policy, 16, 256),
    "envpool-cartpole-256": _envpool("CartPole-v1", small_policy, 256, 64),
    "envpool-cartpole-1024": _envpool("CartPole-v1", small_policy, 1024, 64),
    "envpool-pong": _envpool("Pong-v5", _PONG, 8, 64),
    "envpool-cheetah": _envpool("HalfCheetah-v4", cheetah_policy, 16, 128),
    "envpool-ant": _envpool("Ant-v5", partial(GaussianPolicy, 105, 8), 16, 128),
    "ale-pong": NativeWorkload("ALE's Pong, 8 envs", "ale:Pong", _PONG, 8, 64, ("ale_py",)),
    "gymnasium-cartpole-16": NativeWorkload(
        "Gymnasium's own CartPole, 16 envs", "gymnasium:CartPole-v1", small_policy, 16, 256, ()
    ),
}


# With 4 of these envs at a time.
_UNEVEN = NativeWorkload(
    "", "envpool:CartPole-v1", small_policy, 16, 64, ("envpool",), batch_size=4, uneven_s=0.005
)


def run_beside_loop(seconds: float, *, name: str) -> Values:
    """Frames/s of SyncDataCollector over the bare loop's, by wall time and by CPU time."""
    torch.set_num_threads(1)
    workload = NATIVE[name]
    policy = workload.make_policy()
    bare = VectorLoop(workload.make_env(), policy, workload.num_steps)
    with _collector(workload, policy) as collector:
        wall, pairs = ratio_of_pairs(bare.next, collector.next, seconds / 2, time.perf_counter)
        cpu, _ = ratio_of_pairs(bare.next, collector.next, seconds / 2, time.process_time)
    real = wall / bare.share_of_real
    return {"speed_ratio": wall, "cpu_ratio": cpu, "real_ratio": real, "pairs": pairs}


def run_uneven_loop(seconds: float) -> Values:
    """A bare loop over EnvPool's asynchronous mode."""
    torch.set_num_threads(1)
    loop = AsyncPoolLoop(_UNEVEN.make_env(), _UNEVEN.make_policy(), _UNEVEN.num_steps)
    return {"frames_per_s": frames_per_s(loop.batches(), seconds)}


def run_uneven(
    seconds: float, *, kind: Callable[..., Any] = aSyncDataCollector, at_once: bool = False
) -> Values:
    """A collector over EnvPool's asynchronous mode; ``at_once``: over its synchronous one."""
    torch.set_num_threads(1)
    workload = replace(_UNEVEN, batch_size=None) if at_once else _UNEVEN
    with kind(
        workload.make_env,
        workload.make_policy(),
        frames_per_batch=workload.num_envs * workload.num_steps,
        monitor=Monitor(view=False),
    ) as collector:
        return {"frames_per_s": frames_per_s(_counted(collector), seconds)}


def _counted(collector: Iterable[Any]) -> Iterator[Batch]:
    for batch in collector:
        yield int(batch["collector", "worker_id"].flatten()[0]), batch.numel()


def _collector(workload: NativeWorkload, policy: nn.Module) -> SyncDataCollector:
    return SyncDataCollector(
        workload.make_env(),
        policy,
        frames_per_batch=workload.num_envs * workload.num_steps,
        monitor=Monitor(view=False),
    )


def run_workers(seconds: float, *, name: str) -> Values:
    """Two asynchronous workers with a vector env each."""
    workload = NATIVE[name]
    with MultiaSyncDataCollector(
        workload.make_env,
        workload.make_policy(),
        frames_per_batch=workload.num_envs * workload.num_steps,
        num_workers=_NUM_WORKERS,
        monitor=Monitor(view=False),
    ) as collector:
        return {"frames_per_s": frames_per_s(_counted(collector), seconds)}


def run_loops(seconds: float, *, name: str) -> Values:
    """Two processes, each with a bare loop over such a vector env."""
    loops = partial(_make_loop, name)
    return {"frames_per_s": side_by_side(loops, seconds, _NUM_WORKERS)}


def _make_loop(name: str) -> VectorLoop:
    workload = NATIVE[name]
    return VectorLoop(workload.make_env(), workload.make_policy(), workload.num_steps)
