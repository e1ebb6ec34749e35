"""What really happened in an env: rows that number their episodes and steps, and write it down.

Each row of each env has an endless number of its own, its ``uid``, and a file to which it appends
every reset and step. It needs no lock and outlives its process, so envs in any process can be
compared with the frames that were delivered.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

NUM_ACTIONS = 1000
FACTS = ("uid", "episode", "step", "last action")
LARGEST = 2**40

_RESET, _STEP, _FILLER, _FAULT = range(4)
_WORDS = 8  # of a record: kind, episode, step, action, reward * 8, terminated, truncated, -


class EnvBroke(RuntimeError):
    """What an env raises where its script says so."""


@dataclass(frozen=True)
class Script:
    """What envs do, and where they write it down; it can be pickled.

    Attributes:
        folder: where each row makes its file.
        lengths: lengths of episodes in frames; rows and episodes take turns.
        num_faults: how many times an env raises, over all envs of the run.
        fault_at: the (episode, step) at which the first row of an env raises.
    """

    folder: str
    lengths: tuple[int, ...]
    num_faults: int = 0
    fault_at: tuple[int, int] = (2, 1)

    def length(self, row: int, episode: int) -> int:
        return self.lengths[(3 * row + episode) % len(self.lengths)]

    def row(self, context: Any = None, row: int = 0) -> Row:
        """A new row of an env, whose maker was given this context."""
        return Row(self, context, row)

    def claim(self, kind: str, limit: int = 10**9) -> int:
        """The first number that nobody has taken; -1: all below the limit are taken."""
        for number in range(limit):
            try:
                descriptor = os.open(f"{self.folder}/{kind}-{number}", os.O_CREAT | os.O_EXCL)
            except FileExistsError:
                continue
            os.close(descriptor)
            return number
        return -1


class Row:
    """One row of an env. Its observation is int64 ``[4]``, see ``FACTS``."""

    def __init__(self, script: Script, context: Any, row: int) -> None:
        self.script, self.row = script, row
        place = [-1, -1, -1, 0]
        if context is not None:
            place = [context.worker_id, context.env_index, context.incarnation]
            place.append(int(context.for_evaluation))
        self.uid = script.claim("row")
        self._log = f"{script.folder}/row-{self.uid}"
        self._write(*place, row)
        self.episode, self.steps, self.last_action = -1, 0, -1
        self.num_ways = 3  # how episodes end, by turns: terminated, truncated, both

    def _write(self, *words: int) -> None:
        record = np.array([*words, *[0] * (_WORDS - len(words))], np.int64)
        log = os.open(self._log, os.O_WRONLY | os.O_APPEND)
        os.write(log, record.tobytes())
        os.close(log)

    def observe(self) -> np.ndarray:
        return np.array([self.uid, self.episode, self.steps, self.last_action], np.int64)

    def reset(self) -> np.ndarray:
        self.episode += 1
        self.steps, self.last_action = 0, -1
        self._write(_RESET, self.episode)
        return self.observe()

    def fill(self) -> np.ndarray:
        """A step of a vector env that only resets this row."""
        observation = self.reset()
        self._write(_FILLER, self.episode)
        return observation

    def raise_if_due(self) -> None:
        script = self.script
        if (self.episode, self.steps) == script.fault_at and script.num_faults and self.row == 0:
            number = script.claim("fault", script.num_faults)
            if number >= 0:
                self._write(_FAULT, self.episode, self.steps)
                raise EnvBroke(f"fault {number} of row {self.uid}")

    def step(self, action: Any, bonus: int = 0) -> tuple[np.ndarray, float, bool, bool]:
        """Make a step; ``bonus`` is added to the reward."""
        self.raise_if_due()
        step, self.last_action = self.steps, int(action)
        self.steps += 1
        over = self.steps >= self.script.length(self.row, self.episode)
        way = (self.uid + self.episode) % self.num_ways
        terminated, truncated = over and way != 1, over and way != 0
        reward = (self.uid * 1009 + self.episode * 101 + step * 7 + self.last_action) % 4096
        reward += 8 * bonus
        ends = (int(terminated), int(truncated))
        self._write(_STEP, self.episode, step, self.last_action, reward, *ends)
        return self.observe(), reward / 8, terminated, truncated


class Step(NamedTuple):
    """What really happened in one step."""

    action: int
    reward: float
    terminated: bool
    truncated: bool


@dataclass
class TrueRow:
    """All that happened in a row.

    Attributes:
        steps: by (episode, step).
        faults: the (episode, step) at which the env raised.
        evaluates: whether its env was made for evaluation.
    """

    uid: int
    worker_id: int
    env_index: int
    incarnation: int
    evaluates: bool
    row: int
    steps: dict[tuple[int, int], Step] = field(default_factory=dict)
    faults: list[tuple[int, int]] = field(default_factory=list)

    def episodes(self) -> Iterator[tuple[int, list[Step]]]:
        """The steps of each episode, in order."""
        episodes: dict[int, list[Step]] = {}
        for (episode, _), step in sorted(self.steps.items()):
            episodes.setdefault(episode, []).append(step)
        yield from episodes.items()


class Episode(NamedTuple):
    """The sum of rewards of an episode, and its length in frames."""

    returned: float
    length: int

    @classmethod
    def of(cls, steps: Sequence[Step]) -> Episode:
        return cls(sum(step.reward for step in steps), len(steps))


def read_truth(folder: str) -> dict[int, TrueRow]:
    """All rows that envs have written so far, by uid."""
    rows = {}
    for path in Path(folder).glob("row-*"):
        words = np.fromfile(path, np.int64)
        if not len(words):
            continue  # it is being made
        head, *records = words[: len(words) // _WORDS * _WORDS].reshape(-1, _WORDS).tolist()
        uid = int(path.name[4:])
        row = rows[uid] = TrueRow(uid, *head[:3], bool(head[3]), head[4])
        for kind, episode, step, action, reward, terminated, truncated, _ in records:
            if kind == _STEP:
                made = Step(action, reward / 8, bool(terminated), bool(truncated))
                row.steps[episode, step] = made
            elif kind == _FAULT:
                row.faults.append((episode, step))
    return rows
