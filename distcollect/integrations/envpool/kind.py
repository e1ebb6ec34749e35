"""EnvPool's envs with Gymnasium's interface, without wrappers, as a kind of envs; and their ids."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Sequence
from typing import Any

from distcollect.envs.base import Envs, InfoKeys, Remaker
from distcollect.envs.kinds import EnvKind
from distcollect.envs.vector_ids import VectorMaker
from distcollect.errors import ArgumentError
from distcollect.integrations.envpool.async_batch import AsyncPoolBatch
from distcollect.integrations.envpool.batch import EnvPoolBatch, check_envpool_parts

_FILTERING = threading.Lock()


class EnvPoolKind(EnvKind):
    """Envs of EnvPool, which are vector envs."""

    def batch(self, envs: list[Any], info_keys: InfoKeys | None, makers: Sequence[Remaker]) -> Envs:
        kind = AsyncPoolBatch if envs[0].is_async else EnvPoolBatch
        return kind(envs[0], info_keys, makers[0])


KIND = EnvPoolKind()


class EnvPoolMaker(VectorMaker):
    """Makes an env of EnvPool."""

    def __call__(self, seeds: Sequence[int] | None = None) -> Any:
        pool = self.module("envpool", "envpool")
        # Otherwise EnvPool gives every worker the same seed.
        seed = [*seeds] if seeds is not None else int.from_bytes(os.urandom(3), "little")
        # The filters of warnings belong to the process, not to a thread.
        with _FILTERING, warnings.catch_warnings():
            # Of Gymnasium, on the bounds of spaces that EnvPool declares.
            warnings.filterwarnings("ignore", ".*precision lowered by casting")
            env = pool.make_gymnasium(
                self.name, num_envs=self.num_envs, num_threads=self.num_threads, seed=seed
            )
            # They are made when they are first asked for, with the same warnings.
            _ = env.observation_space, env.action_space
        return env

    def check(self) -> None:
        if self.name not in self.module("envpool", "envpool").list_all_envs():
            raise ArgumentError(
                f"no env {self.env_id!r}: EnvPool has no {self.name!r}; "
                "envpool.list_all_envs() names those that it has"
            )
        # The parts that are checked come from EnvPool itself: no class of an env has its own.
        check_envpool_parts(
            self.module("envpool.classic_control", "envpool").CartPoleGymnasiumEnvPool
        )
