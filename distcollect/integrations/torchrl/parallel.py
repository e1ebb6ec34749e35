"""Waits for the processes of TorchRL's ``ParallelEnv`` without taking a core from them.

Its own method polls for their results without a pause. So this process takes a core from them, if
there are not more cores than processes. It is replaced where its private parts are as expected.
This module imports torchrl.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from torchrl.envs import ParallelEnv, TransformedEnv

TorchRLEnv: TypeAlias = Any  # torchrl.envs.EnvBase, which has no types

# So long, the processes are expected to answer at any moment.
_SOON_S = 0.002
_PAUSE_S = 0.0001
_LOOK_UP_S = 0.1  # for processes that have ended
_PARTS = ("_shm_done_flags", "_worker_indices", "_workers")


class _Wait:
    """Waits for the processes of an env; takes the place of its method ``_wait_for_workers``."""

    def __init__(self, env: TorchRLEnv) -> None:
        self._env = env

    def __call__(self, rows: Sequence[int]) -> None:
        """Wait until the processes of these rows have done what they were told.

        Raises:
            RuntimeError: one has ended, or the time that TorchRL allows is over.
        """
        flags = self._env._shm_done_flags
        indices = [self._env._worker_indices[row] for row in rows]
        begin = time.monotonic()
        look_up = begin + _LOOK_UP_S
        while not all(flags[index] for index in indices):
            now = time.monotonic()
            if now - begin < _SOON_S:
                os.sched_yield()
                continue
            if now > look_up:
                look_up = now + _LOOK_UP_S
                is_over = now - begin > self._env.BATCHED_PIPE_TIMEOUT
                if is_over or not all(each.is_alive() for each in self._env._workers):
                    ParallelEnv._wait_for_workers(self._env, rows)
                    return
            time.sleep(_PAUSE_S)
        for index in indices:
            flags[index] = 0


@contextlib.contextmanager
def letting_processes_run(envs: Iterable[TorchRLEnv]) -> Iterator[None]:
    """Within, what these envs wait for in this process takes no core from their processes.

    It is for envs with transforms over a ``ParallelEnv`` too.
    """
    changed: list[TorchRLEnv] = []
    for env in envs:
        while isinstance(env, TransformedEnv):
            env = env.base_env  # noqa: PLW2901 - the one within
        if type(env) is ParallelEnv and _says_when_done(env):
            env.__dict__["_wait_for_workers"] = _Wait(env)
            changed.append(env)
    try:
        yield
    finally:
        for env in changed:
            env.__dict__.pop("_wait_for_workers", None)


def _says_when_done(env: TorchRLEnv) -> bool:
    """Return True if the processes of an env say by flags in shared memory that they are done."""
    own = vars(env)
    return bool(own.get("_use_buffers")) and not env.is_closed and all(n in own for n in _PARTS)
