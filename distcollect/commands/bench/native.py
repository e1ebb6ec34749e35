"""Native vector envs: SyncDataCollector beside a bare loop over the same vector env.

The bare loop calls the policy and steps the env, and writes observation, action, log-probability,
reward, terminated and truncated into preallocated arrays ``[T, n]``. An env that resets a row in
the step after its end makes filler steps. The bare loop leaves them in, and each of them counts as
one of its frames; the collector delivers none.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import nn

from distcollect import Monitor, SyncDataCollector
from distcollect.commands.bench.alternating import ratio_of_pairs
from distcollect.commands.bench.contenders import Values
from distcollect.commands.bench.workloads import (
    GaussianPolicy,
    cheetah_policy,
    cnn_policy,
    small_policy,
)
from distcollect.envs.vector_ids import VectorMaker, vector_maker


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
    """

    about: str
    env_id: str
    make_policy: Callable[[], nn.Module]
    num_envs: int
    num_steps: int
    needs: tuple[str, ...]

    def make_env(self) -> Any:
        """Make the vector env."""
        maker = vector_maker(self.env_id, self.num_envs)
        if isinstance(maker, VectorMaker):
            return maker()
        name = self.env_id.removeprefix("gymnasium:")
        return gym.make_vec(name, self.num_envs, vectorization_mode="vector_entry_point")


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


class VectorLoop:
    """The bare loop; see the module."""

    def __init__(self, workload: NativeWorkload, policy: nn.Module) -> None:
        self._env, self._policy = workload.make_env(), policy
        shape = (workload.num_steps, workload.num_envs)
        space, action_space = self._env.single_observation_space, self._env.single_action_space
        self._stored = np.zeros((*shape, *space.shape), space.dtype)
        self._actions = np.zeros((*shape, *action_space.shape), action_space.dtype)
        self._log_probs = np.zeros(shape, np.float32)
        self._rewards = np.zeros(shape, np.float32)
        self._terminated = np.zeros(shape, bool)
        self._truncated = np.zeros(shape, bool)
        self._observation, _ = self._env.reset()

    def next(self) -> None:
        """Make T steps."""
        env, policy, observation = self._env, self._policy, self._observation
        with torch.inference_mode():
            for step in range(len(self._rewards)):
                action, written = policy(torch.from_numpy(observation))
                self._stored[step] = observation
                self._actions[step] = chosen = action.numpy()
                self._log_probs[step] = written["action_log_prob"].numpy()
                observation, reward, terminated, truncated, _ = env.step(chosen)
                self._rewards[step] = reward
                self._terminated[step] = terminated
                self._truncated[step] = truncated
        self._observation = observation


def run_beside_loop(seconds: float, *, name: str) -> Values:
    """Frames/s of SyncDataCollector over the bare loop's, and the same by CPU time."""
    torch.set_num_threads(1)
    workload = NATIVE[name]
    policy = workload.make_policy()
    bare = VectorLoop(workload, policy)
    collector = SyncDataCollector(
        workload.make_env(),
        policy,
        frames_per_batch=workload.num_envs * workload.num_steps,
        monitor=Monitor(view=False),
    )
    with collector:
        wall, pairs = ratio_of_pairs(bare.next, collector.next, seconds / 2, time.perf_counter)
        cpu, _ = ratio_of_pairs(bare.next, collector.next, seconds / 2, time.process_time)
    return {"speed_ratio": wall, "cpu_ratio": cpu, "pairs": pairs}
