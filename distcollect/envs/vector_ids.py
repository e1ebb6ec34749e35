"""Env ids that stand for all envs of a worker at once: "envpool:Pong-v5" and "ale:Pong"."""

from __future__ import annotations

import importlib
import os
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from distcollect.common.refusing import refusing
from distcollect.errors import ArgumentError
from distcollect.integrations import load


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

    def module(self, name: str, extra: str) -> Any:
        """Import a module that the extra installs; ArgumentError if it is missing."""
        problem = f"the env {self.env_id!r} needs a package that isn't installed here"
        with refusing(problem, f"pip install 'distcollect[{extra}]'", ModuleNotFoundError):
            importlib.import_module(name)
        return sys.modules[name]


class AtariMaker(VectorMaker):
    """Makes an ``AtariVectorEnv`` of ALE, with its usual preprocessing."""

    def __call__(self, seeds: Sequence[int] | None = None) -> Any:
        make = self.module("ale_py.vector_env", "atari").AtariVectorEnv
        return make(self._rom, self.num_envs, num_threads=self.num_threads)

    def check(self) -> None:
        known = self.module("ale_py.roms", "atari").get_all_rom_ids()
        if self._rom not in known:
            raise ArgumentError(
                f"no env {self.env_id!r}: ALE has no game {self._rom!r}; "
                "ale_py.roms.get_all_rom_ids() names those that it has"
            )

    @property
    def _rom(self) -> str:
        """The game as ALE writes it: "ms_pacman" for "MsPacman"."""
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", self.name).lower()


def vector_maker(env_id: object, num_envs: int = 1) -> VectorMaker | None:
    """Return what makes ``num_envs`` envs of an id; None for an id of Gymnasium, or no id."""
    kind, colon, name = env_id.partition(":") if isinstance(env_id, str) else ("", "", "")
    if not colon or kind not in ("envpool", "ale"):
        return None
    make: type[VectorMaker] = AtariMaker if kind == "ale" else load("ids of envpool")
    return make(str(env_id), name, num_envs)
