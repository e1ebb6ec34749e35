"""Env ids that stand for all envs of a worker at once: "envpool:Pong-v5" and "ale:Pong"."""

from __future__ import annotations

import importlib
import os
import re
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from distcollect.errors import ArgumentError
from distcollect.integrations.envpool.parts import check_envpool_parts

_FILTERING = threading.Lock()


@dataclass(frozen=True)
class VectorMaker(ABC):
    """Makes a vector env of a fixed number of envs.

    Attributes:
        env_id: as the user wrote it.
        name: the part of it that follows the colon.
        num_envs: how many envs the vector env has.
    """

    env_id: str
    name: str
    num_envs: int = 1

    @abstractmethod
    def __call__(self, seeds: Sequence[int] | None = None) -> Any:
        """Make the vector env.

        Args:
            seeds: one for each env, if they have to be known now; None: the env chooses them.
        """

    @abstractmethod
    def check(self) -> None:
        """Raise ArgumentError if there is no such env, or its package is missing or of no use."""

    @property
    def num_threads(self) -> int:
        """Threads that step the envs: as many as this process may use cores, one env each."""
        return min(self.num_envs, len(os.sched_getaffinity(0)))

    def _module(self, name: str, extra: str) -> Any:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as err:
            raise ArgumentError(
                f"the env {self.env_id!r} needs a package that isn't installed here ({err}): "
                f"pip install 'distcollect[{extra}]'"
            ) from err


class EnvPoolMaker(VectorMaker):
    """Makes an env of EnvPool."""

    def __call__(self, seeds: Sequence[int] | None = None) -> Any:
        pool = self._module("envpool", "envpool")
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
        if self.name not in self._module("envpool", "envpool").list_all_envs():
            raise ArgumentError(
                f"no env {self.env_id!r}: EnvPool has no {self.name!r}; "
                "envpool.list_all_envs() names those that it has"
            )
        # The parts that are checked come from EnvPool itself: no class of an env has its own.
        check_envpool_parts(
            self._module("envpool.classic_control", "envpool").CartPoleGymnasiumEnvPool
        )


class AtariMaker(VectorMaker):
    """Makes an ``AtariVectorEnv`` of ALE, with its usual preprocessing."""

    def __call__(self, seeds: Sequence[int] | None = None) -> Any:
        make = self._module("ale_py.vector_env", "atari").AtariVectorEnv
        return make(self._rom, self.num_envs, num_threads=self.num_threads)

    def check(self) -> None:
        known = self._module("ale_py.roms", "atari").get_all_rom_ids()
        if self._rom not in known:
            raise ArgumentError(
                f"no env {self.env_id!r}: ALE has no game {self._rom!r}; "
                "ale_py.roms.get_all_rom_ids() names those that it has"
            )

    @property
    def _rom(self) -> str:
        """The game as ALE writes it: "ms_pacman" for "MsPacman"."""
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", self.name).lower()


_MAKERS: dict[str, type[VectorMaker]] = {"envpool": EnvPoolMaker, "ale": AtariMaker}


def vector_maker(env_id: object, num_envs: int = 1) -> VectorMaker | None:
    """What makes ``num_envs`` envs of this id; None if it is an id of Gymnasium, or no id."""
    kind, colon, name = env_id.partition(":") if isinstance(env_id, str) else ("", "", "")
    make = _MAKERS.get(kind) if colon else None
    return None if make is None else make(str(env_id), name, num_envs)
