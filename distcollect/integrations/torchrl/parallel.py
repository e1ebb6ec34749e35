"""Waits for the processes of TorchRL's ``ParallelEnv`` without taking a core from them.

Its own method polls for their results without a pause. So this process takes a core from them, if
there are not more cores than processes. It is replaced where its private parts are as expected.
This module imports torchrl.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any, TypeAlias

from torchrl import envs

TorchRLEnv: TypeAlias = Any  # torchrl.envs.EnvBase, which has no types

# So long, the processes are expected to answer at any moment.
_SOON_S = 0.002
_PAUSE_S = 0.0001
_LOOK_UP_S = 0.1  # for processes that have ended


class ParallelEnv(envs.ParallelEnv):  # type: ignore[misc]
    """TorchRL's, with another way to wait."""

    def _wait_for_workers(self, rows: Sequence[int]) -> None:
        """Wait until the processes of these rows have done what they were told.

        Raises:
            RuntimeError: one has ended, or the time that TorchRL allows is over.
        """
        own = self.__dict__
        flags, indices = own.get("_shm_done_flags"), own.get("_worker_indices")
        if not own.get("_use_buffers") or flags is None or indices is None:
            super()._wait_for_workers(rows)
            return
        places = [indices[row] for row in rows]
        begin = time.monotonic()
        look_up = begin + _LOOK_UP_S
        while not all(flags[place] for place in places):
            now = time.monotonic()
            if now - begin < _SOON_S:
                os.sched_yield()
                continue
            if now > look_up:
                look_up = now + _LOOK_UP_S
                is_over = now - begin > self.BATCHED_PIPE_TIMEOUT
                if is_over or not all(each.is_alive() for each in self._workers):
                    super()._wait_for_workers(rows)
                    return
            time.sleep(_PAUSE_S)
        for place in places:
            flags[place] = 0


def base_of(env: TorchRLEnv) -> TorchRLEnv:
    """The env below all transforms."""
    while isinstance(env, envs.TransformedEnv):
        env = env.base_env
    return env


def let_processes_run(env: TorchRLEnv) -> None:
    """What an env waits for in this process takes no core from the env's processes from now on.

    It may be a ``ParallelEnv`` with transforms over it; with other envs, nothing happens.
    """
    base = base_of(env)
    if type(base) is envs.ParallelEnv:
        base.__class__ = ParallelEnv
