"""Runs that save, are killed and are resumed; and an account of what their files must hold."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, TypedDict

from helpers.paths import SCRIPTS


class Session(TypedDict):
    """What one process does.

    Attributes:
        script: methods of ``Run`` in the script, with their arguments.
        killed_at: in which of these, at which line of the package, it is killed; JSON has the
            number of a call as text. A call of fewer lines is followed by the end.
        has_workers: whether a worker steps the envs, in place of the process itself.
    """

    script: list[tuple[Any, ...]]
    killed_at: dict[str, int]
    has_workers: bool


class Processes:
    """Runs sessions, each in a process of its own."""

    def __init__(self) -> None:
        self._forker = subprocess.Popen(
            [sys.executable, str(SCRIPTS / "judge_checkpoints.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, **given: Any) -> int:
        """Run a session; returns how its process ended."""
        assert self._forker.stdin is not None
        assert self._forker.stdout is not None
        self._forker.stdin.write(json.dumps(given) + "\n")
        self._forker.stdin.flush()
        return int(self._forker.stdout.readline())

    def close(self) -> None:
        self._forker.communicate(timeout=60)


@dataclass(frozen=True, order=True)
class Result:
    """What ``best`` compares: first whether it was an evaluation, or of how many episodes."""

    weight: float = 0.0
    value: float = -math.inf


@dataclass
class Save:
    """What a save must have written; ``best``: the policy's weight in the file of the best."""

    state: dict[str, Any]
    version: int
    result: Result
    best: float | None


@dataclass(eq=False)
class CheckpointAccount:
    """Follows the sessions of a run.

    Attributes:
        folder: that of the files.
        saves: all that were completed, the oldest first.
        ids: traj_ids that were delivered before the newest save.
        best: what the file of the best holds, and its result.
    """

    folder: Path
    keep_last: int
    total_frames: int
    processes: Processes
    saves: list[Save] = field(default_factory=list)
    ids: set[int] = field(default_factory=set)
    best: tuple[dict[str, Any] | None, Result] = (None, Result())
    _number: int = 0

    def play(self, session: Session) -> None:
        """Run a session, and compare its journal and the files with what must be."""
        self._number += 1
        journal = self.folder / f"journal-{self._number}"
        given = {
            "folder": str(self.folder),
            "journal": str(journal),
            "number": self._number,
            "keep_last": self.keep_last,
            "total_frames": self.total_frames,
            **session,
        }
        code = self.processes.run(**given)
        lines = [json.loads(line) for line in journal.read_text().splitlines()]
        is_told = any(name == "is_told_to_end" for name, *_ in session["script"])
        was_killed = code == -signal.SIGKILL
        assert code == (75 if is_told and not was_killed else -9 if session["killed_at"] else 0)
        under_way = self._follow(lines, was_told=code == 75)
        look = self.folder / "look"
        assert self.processes.run(**{**given, "journal": str(look), "script": None}) == 0
        self._check_files(json.loads(look.read_text()), under_way)

    def _follow(self, lines: list[dict[str, Any]], *, was_told: bool) -> Save | None:
        """Follow a journal; the save that may have been completed, or not."""
        start, *rest = lines
        self._check_start(start)
        self._evaluated, self._weights = Result(), math.nan  # the best evaluation
        self._new_ids: set[int] = set()
        self._is_due = self._saved_end = False
        save: Save | None = None
        for line in rest:
            if "does" in line:
                save = self._wanted(line["does"], line)
                continue
            self._did(line["did"], line["result"], save)
            save = None
        if was_told and save is not None:
            self._saved(save)
            return None
        return save

    def _wanted(self, name: str, before: dict[str, Any]) -> Save | None:
        """What a call is to save; None: nothing."""
        state, is_evaluated = before["state"], self._evaluated.weight > 0
        count, mean = before["episodes"]
        result = Result(min(count, 100) / 101, mean) if count else Result()
        result = self._evaluated if is_evaluated else result
        is_best = result > self.best[1]
        due = self._is_due or (is_best and is_evaluated) or self._is_over(state) > self._saved_end
        if name not in ("save", "is_told_to_end") and not (name == "step" and due):
            return None
        best = self._weights if is_evaluated else state["value"]
        return Save(state, before["version"], result, best if is_best else None)

    def _is_over(self, state: dict[str, Any]) -> bool:
        return -1 < self.total_frames <= state["frames"]

    def _did(self, name: str, result: Any, save: Save | None) -> None:
        if save is not None:
            self._saved(save)
        if name == "step":
            assert result == (save is not None), "whether step() saved"
        elif name == "time_passes":
            self._is_due = True
        elif name == "evaluate":
            [value] = {*result}
            if Result(1, value) > self._evaluated:
                self._evaluated, self._weights = Result(1, value), value
        elif name == "next" and result is not None:
            assert not self.ids & {*result["ids"]}, "traj_ids of before"
            self._new_ids |= {*result["ids"]}

    def _saved(self, save: Save) -> None:
        self.saves.append(save)
        self.ids |= self._new_ids
        self._is_due, self._saved_end = False, self._is_over(save.state)
        if save.best is not None:
            self.best = {**save.state, "value": save.best}, save.result

    def _check_start(self, start: dict[str, Any]) -> None:
        """It goes on from the newest save."""
        assert start["loaded"] == bool(self.saves)
        if self.saves:
            newest = self.saves[-1]
            assert start["state"] == newest.state
            assert start["version"] >= newest.version

    def _check_files(self, found: dict[str, Any], under_way: Save | None) -> None:
        """Check what the files hold; a save that was under way was completed, or not at all."""
        newest = found.pop("c.pt", None)
        best = found.pop("c-best.pt", None)
        before = self.saves[-1].state if self.saves else None
        if under_way is not None and newest == under_way.state != before:
            self.saves.append(under_way)
        states = [save.state for save in self.saves]
        assert newest == (states[-1] if states else None), "the newest file"
        numbered = [found[name] for name in sorted(found, key=lambda name: int(name[2:-3]))]
        # One that was under way may have given the newest file its number already.
        kept = [state for state, _ in groupby([*numbered, *states[-1:]], key=lambda each: each)]
        history = [state for state, _ in groupby(states, key=lambda each: each)]
        assert kept == history[-len(kept) :] or not kept, "the files before"
        if under_way is None:
            assert len(numbered) == max(0, min(self.keep_last, len(states)) - 1)
        expected = [self.best]
        if under_way is not None and under_way.best is not None and newest == under_way.state:
            expected.append(({**under_way.state, "value": under_way.best}, under_way.result))
        assert best in [state for state, _ in expected], "the best"
        self.best = next(each for each in reversed(expected) if each[0] == best)
