"""The loops and collectors of the peers, set up as their manuals say, without costly options.

TorchRL: ``GymWrapper`` around the same env (categorical actions), ``SerialEnv`` for n > 1, the same
policy as a ``TensorDictModule`` that writes "action" and "action_log_prob"; the collector stores
``next`` observations and trajectory ids, as always.

Gymnasium and Stable-Baselines3: a loop calls the policy and steps a vector env, and
observation, action, log-probability, reward, terminated (SB3: done) and truncated are written into
preallocated arrays ``[T, n]``. ``AsyncVectorEnv`` and ``SubprocVecEnv`` have a process for each
env, so 2n processes are compared with two workers of n envs each.

The modules are imported when they are needed: none has to be installed.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import torch
from torch import nn

from benchmarks.vector_loops import Store, VectorLoop
from benchmarks.windows import Batch, frames_per_s
from benchmarks.workloads import Workload

_NUM_WORKERS = 2
_ENDLESS = 10**12  # TorchRL's RPCCollector yields nothing with -1, its own value for endless
_MAX_PROCESSES = 64


class Unfit(RuntimeError):
    """A contender makes no sense on this workload; the message says why."""


class _Acting(nn.Module):
    """Returns the policy's log-probability as a second output, as a TensorDictModule needs it."""

    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        action, written = self.policy(observation)
        return action, written["action_log_prob"]


class _TorchRLMaker:
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


def _torchrl_policy(workload: Workload) -> Any:
    module = importlib.import_module("tensordict.nn").TensorDictModule
    return module(
        _Acting(workload.make_policy()),
        in_keys=["observation"],
        out_keys=["action", "action_log_prob"],
    )


def _torchrl_counted(collector: Any) -> Iterator[Batch]:
    for batch in collector:
        yield 0, batch.numel()


def run_torchrl(workload: Workload, seconds: float) -> dict[str, float]:
    """``Collector``, which steps in this process."""
    torch.set_num_threads(1)
    collector = importlib.import_module("torchrl.collectors").Collector(
        _TorchRLMaker(workload)(),
        _torchrl_policy(workload),
        frames_per_batch=workload.rollout_frames,
        total_frames=_ENDLESS,
    )
    return {"frames_per_s": frames_per_s(_torchrl_counted(collector), seconds)}


def run_torchrl_multi(workload: Workload, seconds: float, *, sync: bool) -> dict[str, float]:
    """``MultiSyncCollector`` or ``MultiAsyncCollector`` with two workers."""
    collectors = importlib.import_module("torchrl.collectors")
    kind = collectors.MultiSyncCollector if sync else collectors.MultiAsyncCollector
    collector = kind(
        [_TorchRLMaker(workload)] * _NUM_WORKERS,
        _torchrl_policy(workload),
        frames_per_batch=workload.rollout_frames * (_NUM_WORKERS if sync else 1),
        total_frames=_ENDLESS,
        **({"cat_results": 0} if sync and workload.num_envs > 1 else {}),
    )
    return {"frames_per_s": frames_per_s(_torchrl_counted(collector), seconds)}


def make_torchrl_multi(workload: Workload, num_workers: int, frames_per_batch: int) -> Any:
    """An endless ``MultiSyncCollector``."""
    return importlib.import_module("torchrl.collectors").MultiSyncCollector(
        [_TorchRLMaker(workload)] * num_workers,
        _torchrl_policy(workload),
        frames_per_batch=frames_per_batch,
        total_frames=_ENDLESS,
        cat_results=0,
    )


def make_torchrl_filling(workload: Workload, num_workers: int, replay_buffer: Any) -> Any:
    """An endless ``MultiAsyncCollector`` whose workers write to ``replay_buffer``."""
    return importlib.import_module("torchrl.collectors").MultiAsyncCollector(
        [_TorchRLMaker(workload)] * num_workers,
        _torchrl_policy(workload),
        frames_per_batch=workload.rollout_frames,
        total_frames=_ENDLESS,
        replay_buffer=replay_buffer,
    )


def make_torchrl_rpc(workload: Workload) -> Any:
    """An endless asynchronous ``RPCCollector(launcher="mp")`` with two workers."""
    return importlib.import_module("torchrl.collectors.distributed").RPCCollector(
        [_TorchRLMaker(workload)] * _NUM_WORKERS,
        _torchrl_policy(workload),
        frames_per_batch=workload.rollout_frames,
        total_frames=_ENDLESS,
        launcher="mp",
        sync=False,
    )


def run_torchrl_rpc(workload: Workload, seconds: float) -> dict[str, float]:
    """``RPCCollector(launcher="mp")`` with two workers."""
    return {"frames_per_s": frames_per_s(_torchrl_counted(make_torchrl_rpc(workload)), seconds)}


def run_gym_sync(workload: Workload, seconds: float) -> dict[str, float]:
    """A loop over ``SyncVectorEnv`` with n envs, observations not copied."""
    torch.set_num_threads(1)
    envs: Any = gym.vector.SyncVectorEnv(
        [workload.make_env] * workload.num_envs,
        copy=False,
        autoreset_mode=gym.vector.AutoresetMode.SAME_STEP,
    )
    return {"frames_per_s": frames_per_s(_gym_batches(workload, envs), seconds)}


def _gym_batches(workload: Workload, envs: Any) -> Iterator[Batch]:
    return VectorLoop(envs, workload.make_policy(), workload.num_steps).batches()


def _two_workers_worth(workload: Workload) -> int:
    rows = _NUM_WORKERS * workload.num_envs
    if rows > _MAX_PROCESSES:
        raise Unfit(f"would be {rows} processes, one for each env")
    return rows


def run_gym_async(workload: Workload, seconds: float) -> dict[str, float]:
    """A loop over ``AsyncVectorEnv`` with 2n envs, observations in shared memory, not copied."""
    rows = _two_workers_worth(workload)
    envs: Any = gym.vector.AsyncVectorEnv(
        [workload.make_env] * rows,
        copy=False,
        context="fork",
        autoreset_mode=gym.vector.AutoresetMode.SAME_STEP,
    )
    return {"frames_per_s": frames_per_s(_gym_batches(workload, envs), seconds)}


def run_sb3(workload: Workload, seconds: float) -> dict[str, float]:
    """A loop over ``SubprocVecEnv`` with 2n envs."""
    rows = _two_workers_worth(workload)
    vec_env = importlib.import_module("stable_baselines3.common.vec_env")
    envs = vec_env.SubprocVecEnv([workload.make_env] * rows, start_method="fork")
    return {"frames_per_s": frames_per_s(_sb3_batches(workload, envs, rows), seconds)}


def _sb3_batches(workload: Workload, envs: Any, rows: int) -> Iterator[Batch]:
    store = Store(envs, workload.num_steps, rows)
    policy = workload.make_policy()
    observation = envs.reset()
    while True:
        with torch.inference_mode():
            for step in range(store.num_steps):
                action, written = policy(torch.from_numpy(observation))
                store.observation[step] = observation
                store.action[step] = chosen = action.numpy()
                store.log_prob[step] = written["action_log_prob"].numpy()
                observation, reward, done, infos = envs.step(chosen)
                store.reward[step] = reward
                store.terminated[step] = done
                if done.any():
                    store.truncated[step] = [info["TimeLimit.truncated"] for info in infos]
        yield 0, store.reward.size
