"""Bare loops over vector envs, the limits and the peers of collectors that step the same envs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.windows import Batch


class Store:
    """Preallocated arrays ``[T, n]`` for the frames of n envs."""

    def __init__(self, env: Any, num_steps: int, num_envs: int) -> None:
        """Allocate them; ``env`` has the spaces: a single env, or a vector env."""
        space = getattr(env, "single_observation_space", env.observation_space)
        action_space = getattr(env, "single_action_space", env.action_space)
        shape = (num_steps, num_envs)
        self.num_steps = num_steps
        self.observation = np.zeros((*shape, *space.shape), space.dtype)
        self.action = np.zeros((*shape, *action_space.shape), action_space.dtype)
        self.log_prob = np.zeros(shape, np.float32)
        self.reward = np.zeros(shape, np.float32)
        self.terminated = np.zeros(shape, bool)
        self.truncated = np.zeros(shape, bool)

    def put(self, step: int, observation: Any, chosen: tuple[Any, Any]) -> np.ndarray:
        """Store what comes before a step; returns the action."""
        action, written = chosen
        self.observation[step] = observation
        self.action[step] = action = action.numpy()
        self.log_prob[step] = written["action_log_prob"].numpy()
        return action


class VectorLoop:
    """Calls the policy and steps a vector env, and stores the frames as they come.

    True final observations are not looked for. Where the env resets a row in the step after its
    end, that step counts as a frame, too.
    """

    def __init__(self, env: Any, policy: nn.Module, num_steps: int) -> None:
        self._env, self._policy = env, policy
        self._store = Store(env, num_steps, env.num_envs)
        self._observation, _ = env.reset()

    def next(self) -> None:
        """Make T steps."""
        env, policy, store, observation = self._env, self._policy, self._store, self._observation
        with torch.inference_mode():
            for step in range(store.num_steps):
                chosen = store.put(step, observation, policy(torch.from_numpy(observation)))
                observation, reward, terminated, truncated, _ = env.step(chosen)
                store.reward[step] = reward
                store.terminated[step] = terminated
                store.truncated[step] = truncated
        self._observation = observation


class AsyncPoolLoop:
    """The same with an EnvPool env whose ``batch_size`` m is below n: m rows at a time.

    The steps of all rows are stored as they come, ``[T * n / m, m]``, with their rows. Those in
    which a row was reset are stored, too, but do not count as frames.
    """

    def __init__(self, env: Any, policy: nn.Module, num_steps: int) -> None:
        self._env, self._policy = env, policy
        num_ready = env.config["batch_size"]
        self._store = Store(env, num_steps * env.num_envs // num_ready, num_ready)
        self._rows = np.zeros(self._store.reward.shape, np.int32)
        env.async_reset()

    def next(self) -> int:
        """Take as many results as there are in T steps of all rows; the number of frames."""
        env, policy, store, num_frames = self._env, self._policy, self._store, 0
        with torch.inference_mode():
            for step in range(store.num_steps):
                observation, reward, terminated, truncated, info = env.recv()
                self._rows[step] = rows = info["env_id"]
                num_frames += int(np.count_nonzero(info["elapsed_step"]))
                chosen = store.put(step, observation, policy(torch.from_numpy(observation)))
                store.reward[step] = reward
                store.terminated[step] = terminated
                store.truncated[step] = truncated
                env.send(chosen, rows)
        return num_frames

    def batches(self) -> Iterator[Batch]:
        """The same again and again."""
        while True:
            yield 0, self.next()
