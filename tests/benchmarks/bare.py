"""The limit: a policy and plain envs in the leanest loop that can be written by hand.

A process makes n envs and calls the policy once for all of them in each step, under inference mode.
Observations are written once, into a preallocated tensor ``[T + 1, n, *obs]`` from which the policy
reads with no copy; action, log-probability, reward, terminated and truncated into tensors
``[T, n]``; true final observations go to a list. Nothing is delivered, and neither ``next``
observations nor ids are made. For W workers, W such processes run side by side, started together
by a barrier, and their rates are summed: the rate of W workers whose communication costs nothing.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from benchmarks.items import Values
from benchmarks.windows import Batch, frames_per_s
from benchmarks.workloads import WORKLOADS, Workload

_JOIN_TIMEOUT_S = 60.0


class BareLoop:
    """n envs, a policy, and memory for one rollout, which is written over and over."""

    def __init__(self, workload: Workload) -> None:
        self._steps, rows = workload.num_steps, workload.num_envs
        self._envs = [workload.make_env() for _ in range(rows)]
        self._policy = workload.make_policy()
        space, action_space = self._envs[0].observation_space, self._envs[0].action_space
        assert space.shape is not None
        assert action_space.shape is not None
        dtypes = [torch.from_numpy(np.empty(0, s.dtype)).dtype for s in (space, action_space)]
        observations = torch.zeros((self._steps + 1, rows, *space.shape), dtype=dtypes[0])
        # Slices are made once: slicing a tensor costs more than writing a small row.
        self._inputs = list(observations)
        self._observations = list(observations.numpy())
        self._actions = np.zeros((self._steps, rows, *action_space.shape), action_space.dtype)
        self._log_probs = np.zeros((self._steps, rows), np.float32)
        self._rewards = np.zeros((self._steps, rows), np.float32)
        self._terminated = np.zeros((self._steps, rows), bool)
        self._truncated = np.zeros((self._steps, rows), bool)
        self._final: list[tuple[int, int, Any]] = []
        for row, env in enumerate(self._envs):
            self._observations[-1][row] = env.reset()[0]

    def batches(self) -> Iterator[Batch]:
        """Collect rollouts without end."""
        while True:
            with torch.inference_mode():
                self._fill()
            yield 0, self._rewards.size

    def _fill(self) -> None:
        policy, envs, final = self._policy, self._envs, self._final
        observations, rewards = self._observations, self._rewards
        observations[0][:] = observations[-1]
        self._terminated.fill(False)
        self._truncated.fill(False)
        final.clear()
        for step in range(self._steps):
            action, written = policy(self._inputs[step])
            chosen = action.numpy()
            self._actions[step] = chosen
            self._log_probs[step] = written["action_log_prob"].numpy()
            following, reward = observations[step + 1], rewards[step]
            for row, env in enumerate(envs):
                observation, reward[row], terminated, truncated, _ = env.step(chosen[row])
                if terminated or truncated:
                    self._terminated[step, row] = terminated
                    self._truncated[step, row] = truncated
                    final.append((step, row, observation))
                    observation = env.reset()[0]
                following[row] = observation


def run_bare(seconds: float, *, name: str, num_processes: int) -> Values:
    """Measure bare loops side by side, each in a process of its own; their frames/s together."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(num_processes)
    results = context.SimpleQueue()
    processes = [
        context.Process(target=_run_loop, args=(name, seconds, barrier, results))
        for _ in range(num_processes)
    ]
    for process in processes:
        process.start()
    # A process that fails breaks the barrier, and is found by its exit code.
    for process in processes:
        process.join(_JOIN_TIMEOUT_S + 4 * seconds)
    codes = [process.exitcode for process in processes]
    if any(codes) or None in codes:
        raise RuntimeError(f"the bare loops ended with exit codes {codes}")
    return {"frames_per_s": sum(results.get() for _ in processes)}


def _run_loop(name: str, seconds: float, barrier: Any, results: Any) -> None:
    torch.set_num_threads(1)
    loop = BareLoop(WORKLOADS[name])

    def together() -> None:
        barrier.wait(_JOIN_TIMEOUT_S)

    rate = frames_per_s(loop.batches(), seconds, start=together)
    results.put(rate)
    # The first process to finish leaves the others more of the machine. That changes little: their
    # windows end at the same time, give or take a rollout.
