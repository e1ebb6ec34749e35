"""The workload by which TorchRL measures its asynchronous collectors, with theirs and with ours.

``benchmarks/ASYNC_BENCHMARKS.md`` of TorchRL describes it: 8 envs on the CPU whose steps sleep for
1 ms, observations of random bytes 3x84x84, a small CNN as the policy, batches of 256 frames.
Episodes have 200 frames; in the regime "slow-reset" they have 16, and each reset of the first env
takes 200 ms. Theirs step an env of TorchRL, ours one of Gymnasium that does the same.

Not to be imported where torchrl isn't installed.
"""

from __future__ import annotations

import time
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

from benchmarks import contenders, peers
from benchmarks.items import Values
from benchmarks.windows import frames_per_s
from distcollect import EnvContext, Monitor, MultiaSyncDataCollector

_NUM_ENVS = 8
_FRAMES_PER_BATCH = 256
_SHAPE = (3, 84, 84)
_NUM_ACTIONS = 6
_STEP_S = 0.001
_TIMEOUT_S = 0.001  # for which TorchRL's policy server waits for more requests


# The frames in an episode, and the seconds that a reset of env 0 takes.
REGIMES = {"uniform": (200, 0.0), "slow-reset": (16, 0.2)}


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


def _make(kind: Any, regime: str, index: int) -> Any:
    episode, reset_s = REGIMES[regime]
    return kind(episode, 0.0 if index else reset_s)


def _make_ours(regime: str, context: EnvContext) -> Any:
    return _make(PixelEnv, regime, context.worker_id)


def run(seconds: float, *, regime: str, who: str) -> Values:
    """Frames/s of one of them, with 8 envs: "ours", "multi", "threads" or "processes"."""
    torch.set_num_threads(1)
    if who == "ours":
        with MultiaSyncDataCollector(
            partial(_make_ours, regime),
            PixelPolicy(),
            frames_per_batch=_FRAMES_PER_BATCH,
            num_workers=_NUM_ENVS,
            monitor=Monitor(view=False),
        ) as collector:
            return {"frames_per_s": frames_per_s(contenders.counted(collector), seconds)}
    makers = [partial(_make, TorchRLPixelEnv, regime, index) for index in range(_NUM_ENVS)]
    policy = TensorDictModule(PixelPolicy(), in_keys=["observation"], out_keys=["action"])
    given: dict[str, Any] = {"frames_per_batch": _FRAMES_PER_BATCH, "total_frames": -1}
    if who == "multi":
        theirs = MultiAsyncCollector(makers, policy, **given)
    else:
        theirs = AsyncBatchedCollector(
            makers,
            policy=policy,
            min_batch_size=1,
            max_batch_size=_NUM_ENVS,
            server_timeout=_TIMEOUT_S,
            env_backend={"threads": "threading", "processes": "multiprocessing"}[who],
            **given,
        )
    return {"frames_per_s": frames_per_s(peers.counted(theirs), seconds)}
