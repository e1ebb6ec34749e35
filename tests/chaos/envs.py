"""The envs and the policy: each frame shows its env, its process and its weights.

The envs of a process share a file with the trainer. In it the process counts its steps, so
the count survives the process, and reads orders to raise or hang.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import mmap
import os
import secrets
import time
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from distcollect.envs.make import EnvContext

JOINER_VARIABLE = "DISTCOLLECT_CHAOS_JOINER"
# The entries of an observation.
TOKEN, ENV, NUMBER, EPISODE, STEP, LENGTH = range(6)
_LENGTHS = (5, 40)
_FOREVER_S = 10_000


class Order(IntEnum):
    """What the next step or reset of a process shall do."""

    NONE = 0
    RAISE_IN_STEP = 1
    RAISE_IN_RESET = 2
    HANG = 3
    HANG_WITH_GIL = 4


class Record:
    """The file of a process: int64 numbers that it and the trainer read and write.

    Attributes:
        token: identifies the process.
    """

    def __init__(self, path: Path) -> None:
        """Map the existing file."""
        self.token = int(path.name, 16)
        with path.open("r+b") as file:
            self._cells = np.frombuffer(mmap.mmap(file.fileno(), mmap.PAGESIZE), np.int64)

    @property
    def order(self) -> Order:
        """The order that has not been carried out yet."""
        return Order(self._cells[0])

    @property
    def stepped(self) -> int:
        """The number of frames that the process has stepped."""
        return int(self._cells[1])

    @property
    def worker_id(self) -> int:
        """The process's slot."""
        return int(self._cells[2])

    @property
    def incarnation(self) -> int:
        """The number of the process in its slot, counted from 0."""
        return int(self._cells[3])

    @property
    def joiner(self) -> int:
        """The number of the joiner that started it; -1: the trainer."""
        return int(self._cells[4])

    @property
    def obeyed_at(self) -> float:
        """When it last carried out an order, in ``time.monotonic()`` of the calling process."""
        # Hosts have different monotonic clocks, but the same wall clock.
        return time.monotonic() - (time.time() - float(self._cells[5]) / 1e9)

    def detach(self) -> None:
        """Keep the current numbers, and unmap the file."""
        self._cells = self._cells.copy()

    def give(self, order: Order) -> None:
        """Order the process to do this once."""
        self._cells[0] = order

    def obey(self) -> None:
        """Record that the order is carried out now."""
        self._cells[5] = time.time_ns()
        self._cells[0] = Order.NONE

    def count_step(self) -> None:
        """Count a frame."""
        self._cells[1] += 1

    def introduce(self, worker_id: int, incarnation: int = 0) -> None:
        """Write which worker the process is; -1: an inference server."""
        joiner = int(os.environ.get(JOINER_VARIABLE, "-1"))
        self._cells[2:5] = worker_id, incarnation, joiner


@functools.cache
def _my_record(folder: Path) -> Record:
    token = secrets.randbits(48)
    new = folder / f"{token:012x}.new"
    with new.open("wb") as file:
        file.truncate(mmap.PAGESIZE)
    return Record(new.rename(folder / f"{token:012x}"))


_numbers = itertools.count()


class Numbered(gym.Env[np.ndarray, np.int64]):
    """Numbers its frames from 0; observations have all that the checks need."""

    observation_space = spaces.Box(0, 2**53, (6,), np.int64)
    action_space = spaces.Discrete(2)

    def __init__(self, record: Record, pause_s: float) -> None:
        self._record = record
        self._pause_s = pause_s
        self._env = next(_numbers)
        self._number = 0
        self._episode = -1
        self._step = self._length = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        if self._record.order is Order.RAISE_IN_RESET and self._number:
            self._record.obey()
            raise RuntimeError("told to raise in reset")
        self._episode += 1
        self._step = 0
        self._length = int(self.np_random.integers(*_LENGTHS))
        return self._observe(), {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        if self._record.order not in (Order.NONE, Order.RAISE_IN_RESET):
            self._misbehave(self._record.order)
        time.sleep(self._pause_s)
        reward = reward_of(self._number)
        self._step += 1
        self._number += 1
        self._record.count_step()
        return self._observe(), reward, self._step == self._length, False, {}

    def _misbehave(self, order: Order) -> None:
        self._record.obey()
        if order is Order.RAISE_IN_STEP:
            raise RuntimeError("told to raise in step")
        if order is Order.HANG_WITH_GIL:
            ctypes.PyDLL(None).sleep(_FOREVER_S)
        time.sleep(_FOREVER_S)

    def _observe(self) -> np.ndarray:
        mine = (self._record.token, self._env, self._number)
        return np.array([*mine, self._episode, self._step, self._length], np.int64)


def reward_of(number: int) -> float:
    """The reward of the frame with this number."""
    return float(number % 7)


@dataclass(frozen=True)
class Maker:
    """Makes envs; ``folder`` has the files of their processes, a step takes ``pause_s``."""

    folder: Path
    pause_s: float

    def __call__(self, context: EnvContext) -> Numbered:
        record = _my_record(self.folder)
        record.introduce(context.worker_id, context.incarnation)
        return Numbered(record, self.pause_s)


class Marking(nn.Module):
    """Writes its weights into each frame, and in an inference server also which process it is."""

    def __init__(self, folder: Path | None) -> None:
        """``folder`` has the files of inference servers; None: there are none."""
        super().__init__()
        self._folder = folder
        self.mark = nn.Parameter(torch.zeros(1))
        self.ballast = nn.Parameter(torch.zeros(50_000))

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Choose action 0; write both ends of the weights, which shows pushes that were mixed."""
        n = len(observation)
        ends = torch.stack([self.mark.detach()[0], self.ballast.detach()[-1]])
        told = {"mark": ends.expand(n, 2)}
        if self._folder is not None:
            record = _my_record(self._folder)
            record.introduce(-1)
            if record.order is Order.HANG:
                record.obey()
                time.sleep(_FOREVER_S)
            told["server"] = torch.full((n,), record.token)
        return torch.zeros(n, dtype=torch.int64), told

    def become(self, version: int) -> None:
        """Fill all weights with ``version``."""
        for parameter in self.parameters():
            parameter.data.fill_(version)
