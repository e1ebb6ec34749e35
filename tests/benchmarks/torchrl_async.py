"""The workload by which TorchRL measures its asynchronous collectors, with theirs and with ours.

``benchmarks/ASYNC_BENCHMARKS.md`` of TorchRL describes it: 8 envs on the CPU whose steps sleep for
1 ms, observations of random bytes 3x84x84, a small CNN as the policy, batches of 256 frames.
Episodes have 200 frames; in the regime "slow-reset" they have 16, and each reset of the first env
takes 200 ms. Theirs step an env of TorchRL, ours one of Gymnasium that does the same.

Not to be imported where torchrl isn't installed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.collectors import AsyncBatchedCollector, MultiAsyncCollector
from torchrl.data import Bounded, Categorical, Composite, Unbounded
from torchrl.envs import EnvBase

from benchmarks.contenders import Values
from benchmarks.windows import Batch, frames_per_s
from distcollect import EnvContext, Monitor, MultiaSyncDataCollector

_NUM_ENVS = 8
_FRAMES_PER_BATCH = 256
_SHAPE = (3, 84, 84)
_NUM_ACTIONS = 6
_STEP_S = 0.001
_RESET_S = 0.2
_LONG, _SHORT = 200, 16
_TIMEOUT_S = 0.001  # for which TorchRL's policy server waits for more requests


@dataclass(frozen=True)
class Regime:
    """Lengths of episodes, and of resets.

    Attributes:
        episode: frames.
        reset_s: seconds that a reset of env 0 takes.
    """

    episode: int
    reset_s: float = 0.0

    def reset_time(self, index: int) -> float:
        """Seconds that a reset of env ``index`` takes."""
        return self.reset_s if index == 0 else 0.0


REGIMES = {"uniform": Regime(_LONG), "slow-reset": Regime(_SHORT, _RESET_S)}


class PixelEnv(gym.Env[Any, Any]):
    """The env for our collectors."""

    def __init__(self, episode: int, reset_s: float) -> None:
        """An episode has ``episode`` frames, and a reset takes ``reset_s`` seconds."""
        self.observation_space = spaces.Box(0, 255, _SHAPE, np.uint8)
        self.action_space = spaces.Box(-1, 1, (_NUM_ACTIONS,), np.float32)
        self._episode, self._reset_s, self._frames = episode, reset_s, 0
        self._rng = np.random.default_rng()

    def _pixels(self) -> np.ndarray:
        return self._rng.integers(0, 256, _SHAPE, np.uint8)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        if self._reset_s:
            time.sleep(self._reset_s)
        self._frames = 0
        return self._pixels(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(_STEP_S)
        self._frames += 1
        reward = float(self._rng.standard_normal())
        return self._pixels(), reward, self._frames >= self._episode, False, {}


class TorchRLPixelEnv(EnvBase):  # type: ignore[misc]
    """The env for TorchRL's collectors."""

    def __init__(self, episode: int, reset_s: float) -> None:
        """See PixelEnv."""
        super().__init__()
        pixels = Unbounded(shape=_SHAPE, dtype=torch.uint8)
        self.observation_spec = Composite(observation=pixels)
        self.action_spec = Bounded(-1.0, 1.0, shape=(_NUM_ACTIONS,), dtype=torch.float32)
        self.reward_spec = Unbounded(shape=(1,), dtype=torch.float32)
        self.done_spec = Categorical(n=2, dtype=torch.bool, shape=(1,))
        self._episode, self._reset_s, self._frames = episode, reset_s, 0

    def _set_seed(self, seed: int | None) -> None:
        torch.manual_seed(seed or 0)

    def _outcome(self, *, done: bool) -> dict[str, Tensor]:
        flag = torch.full((1,), done)
        pixels = torch.randint(0, 256, _SHAPE, dtype=torch.uint8)
        return {"observation": pixels, "done": flag, "terminated": flag.clone()}

    def _reset(self, tensordict: TensorDictBase | None = None, **_: Any) -> TensorDict:
        if self._reset_s:
            time.sleep(self._reset_s)
        self._frames = 0
        return TensorDict(self._outcome(done=False), [])

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        time.sleep(_STEP_S)
        self._frames += 1
        done = self._frames >= self._episode
        return TensorDict({**self._outcome(done=done), "reward": torch.randn(1)}, [])


class PixelPolicy(nn.Module):
    """TorchRL's CNN for this workload: uint8 ``[..., 3, 84, 84]`` to actions ``[..., 6]``."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 8, stride=4),
            nn.ReLU(),
            nn.Conv2d(16, 32, 4, stride=2),
            nn.ReLU(),
            nn.Conv2d(32, 32, 3, stride=1),
            nn.ReLU(),
            nn.Flatten(-3),
            nn.Linear(32 * 7 * 7, 256),
            nn.ReLU(),
            nn.Linear(256, _NUM_ACTIONS),
        )

    def forward(self, observation: Tensor) -> Tensor:
        """Actions between -1 and 1."""
        actions: Tensor = torch.tanh(self.body(observation.float() / 255.0))
        return actions


def _torchrl_policy() -> TensorDictModule:
    return TensorDictModule(PixelPolicy(), in_keys=["observation"], out_keys=["action"])


class _Maker:
    """Makes the env of each of our workers."""

    def __init__(self, regime: Regime) -> None:
        self._regime = regime

    def __call__(self, context: EnvContext) -> PixelEnv:
        return PixelEnv(self._regime.episode, self._regime.reset_time(context.worker_id))


def _torchrl_makers(regime: Regime) -> list[Any]:
    return [
        partial(TorchRLPixelEnv, regime.episode, regime.reset_time(index))
        for index in range(_NUM_ENVS)
    ]


def _counted(collector: Any) -> Iterator[Batch]:
    for batch in collector:
        yield 0, batch.numel()


def run_ours(seconds: float, *, regime: str) -> Values:
    """MultiaSyncDataCollector with 8 workers of one env each."""
    torch.set_num_threads(1)
    with MultiaSyncDataCollector(
        _Maker(REGIMES[regime]),
        PixelPolicy(),
        frames_per_batch=_FRAMES_PER_BATCH,
        num_workers=_NUM_ENVS,
        monitor=Monitor(view=False),
    ) as collector:
        batches = (
            (int(batch["collector", "worker_id"].flatten()[0]), batch.numel())
            for batch in collector
        )
        return {"frames_per_s": frames_per_s(batches, seconds)}


def run_multi(seconds: float, *, regime: str) -> Values:
    """TorchRL's MultiAsyncCollector with 8 workers of one env each."""
    torch.set_num_threads(1)
    collector = MultiAsyncCollector(
        _torchrl_makers(REGIMES[regime]),
        _torchrl_policy(),
        frames_per_batch=_FRAMES_PER_BATCH,
        total_frames=-1,
    )
    return {"frames_per_s": frames_per_s(_counted(collector), seconds)}


def run_batched_in_threads(seconds: float, *, regime: str) -> Values:
    """TorchRL's AsyncBatchedCollector with its envs in threads."""
    return _run_batched(seconds, regime, "threading")


def run_batched_in_processes(seconds: float, *, regime: str) -> Values:
    """TorchRL's AsyncBatchedCollector with its envs in processes."""
    return _run_batched(seconds, regime, "multiprocessing")


def _run_batched(seconds: float, regime: str, env_backend: str) -> Values:
    torch.set_num_threads(1)
    collector = AsyncBatchedCollector(
        _torchrl_makers(REGIMES[regime]),
        policy=_torchrl_policy(),
        frames_per_batch=_FRAMES_PER_BATCH,
        total_frames=-1,
        min_batch_size=1,
        max_batch_size=_NUM_ENVS,
        server_timeout=_TIMEOUT_S,
        env_backend=env_backend,
    )
    return {"frames_per_s": frames_per_s(_counted(collector), seconds)}
