"""Steps TorchRL's ``ParallelEnv`` as it steps itself, in less time.

Its own method polls for the results of its processes without a pause. So this process takes a core
from them, if there are not more cores than processes. Here it lets them run.

This module imports torchrl, and uses private parts of it. An env for which they are not as expected
is stepped by its own method.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeAlias

from tensordict import TensorDict, TensorDictBase
from torchrl.envs import ParallelEnv, TransformedEnv

from distcollect.integrations.torchrl.gym import tensordict_has_parts

TorchRLEnv: TypeAlias = Any  # torchrl.envs.EnvBase, which has no types

_COMMAND = "step_and_maybe_reset"
# So long, the processes are expected to answer at any moment.
_SOON_S = 0.002
_PAUSE_S = 0.0001
_LOOK_UP_S = 0.1  # for processes that have ended
_PARTS = (
    "_env_input_keys",
    "_shared_tensordict_parent_next",
    "_shared_tensordict_parent_root",
    "parent_channels",
    "shared_tensordict_parent",
)


def is_usual_parallel_env(env: TorchRLEnv) -> bool:
    """Whether :class:`ParallelStep` can make the steps of the env."""
    own = vars(env)
    return (
        type(env) is ParallelEnv
        and tensordict_has_parts()
        and _has_flags(env)
        and all(name in own for name in _PARTS)
        and own.get("_non_tensor_keys") in ([], (), set())
        and type(env.shared_tensordict_parent) is TensorDict
        and env.shared_tensordict_parent.device == env.device
        and (env.device is None or env.device.type == "cpu")
        and not getattr(env, "_get_collector_next_keys_to_exclude", list)()
    )


class ParallelStep:
    """``step_and_maybe_reset`` of an env with :func:`is_usual_parallel_env`."""

    def __init__(self, env: TorchRLEnv) -> None:
        self._env = env
        self._batch_size, self._device = env.batch_size, env.device
        shared = env.shared_tensordict_parent
        self._inputs = [(key, shared.get(key)) for key in env._env_input_keys]
        self._next = env._shared_tensordict_parent_next
        self._root = env._shared_tensordict_parent_root
        self._channels = env.parent_channels
        self._rows = range(env.num_workers)
        self._wait = _Wait(env)
        self._message = bytes(ForkingPickler.dumps((_COMMAND, {})))

    def __call__(self, td: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        """One transition, and a reset of the rows that ended; see ``step_and_maybe_reset``."""
        if (
            type(td) is not TensorDict
            or td.batch_size != self._batch_size
            or td.device != self._device
            or td._get_str("_step", None) is not None
            or td._get_str("next", None) is not None
        ):
            stepped: tuple[TensorDictBase, TensorDictBase] = self._env.step_and_maybe_reset(td)
            return stepped
        for key, shared in self._inputs:
            value = td.get(key, None)
            if value is not None:
                shared.copy_(value)
        try:
            for channel in self._channels:
                channel.send_bytes(self._message)
        except OSError:
            ParallelEnv._wait_for_workers(self._env, self._rows)  # says which process has ended
        else:
            self._wait(self._rows)
        following, start = self._copy(self._next), self._copy(self._root)
        td._set_str("next", following, validated=True, inplace=False, non_blocking=False)
        return td, start

    def _copy(self, shared: TensorDictBase) -> TensorDictBase:
        entries = {name: value.clone() for name, value in shared.items()}
        made: TensorDict = TensorDict._new_unsafe(
            entries, batch_size=self._batch_size, device=self._device
        )
        return made


class _Wait:
    """Waits for the processes of an env; takes the place of its method ``_wait_for_workers``."""

    def __init__(self, env: TorchRLEnv) -> None:
        self._env = env
        self._flags = env._shm_done_flags
        self._indices = env._worker_indices

    def __call__(self, rows: Sequence[int]) -> None:
        """Wait until the processes of these rows have done what they were told.

        Raises:
            RuntimeError: one has ended, or the time that TorchRL allows is over.
        """
        flags, indices = self._flags, [self._indices[row] for row in rows]
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
        if type(env) is ParallelEnv and _has_flags(env):
            env.__dict__["_wait_for_workers"] = _Wait(env)
            changed.append(env)
    try:
        yield
    finally:
        for env in changed:
            env.__dict__.pop("_wait_for_workers", None)


def _has_flags(env: TorchRLEnv) -> bool:
    """Whether the processes of an env say by flags in shared memory that they are done."""
    own = vars(env)
    names = ("_shm_done_flags", "_worker_indices", "_workers")
    return bool(own.get("_use_buffers")) and not env.is_closed and all(n in own for n in names)
