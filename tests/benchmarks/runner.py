"""Runs the parts of items, each in a process of its own that is killed when it takes too long."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from benchmarks.items import Part, Values

_WINDOWS = 10  # that a part may take, with its warm-up and its last batches
_LOG_LINES = 5
_REAP_TIMEOUT_S = 10.0

Status: TypeAlias = Literal["ok", "not installed", "failed"]


@dataclass
class Outcome:
    """The result of a part.

    Attributes:
        values: named values of each repeat, in order; None for a repeat that gave none.
        status: whether it could be measured.
        reason: why not; "" if the status is "ok".
    """

    values: list[Values | None] = field(default_factory=list)
    status: Status = "ok"
    reason: str = ""


def run_item(
    item: str,
    parts: Mapping[str, Part],
    *,
    repeats: int,
    seconds: float,
    progress: Callable[[str], None],
) -> dict[str, Outcome]:
    """Measure ``parts`` in each of ``repeats`` rounds; one that failed is not tried again."""
    outcomes = {name: Outcome() for name in parts}
    for name, part in parts.items():
        if missing := [module for module in part.needs if importlib.util.find_spec(module) is None]:
            outcomes[name].status, outcomes[name].reason = "not installed", ", ".join(missing)
    for repeat in range(repeats):
        for name, part in parts.items():
            if outcomes[name].status == "ok":
                progress(f"{item} {name} {repeat + 1}/{repeats}")
                _run_part(item, name, part, seconds, outcomes[name])
            else:
                outcomes[name].values.append(None)
    return outcomes


def _run_part(item: str, name: str, part: Part, seconds: float, outcome: Outcome) -> None:
    """Append a part's values to ``outcome``, or the reason why there are none."""
    limit_s = part.limit_s + _WINDOWS * seconds
    with tempfile.TemporaryDirectory(prefix="distcollect-bench-") as folder:
        result, log = Path(folder, "result.json"), Path(folder, "log.txt")
        hung = not _run_process([item, name, str(seconds), str(result)], log, limit_s)
        said: dict[str, object] = {}
        if result.exists():
            said = json.loads(result.read_text())
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    values = said.get("values")
    if isinstance(values, dict):
        outcome.values.append(values)
        return
    outcome.values.append(None)
    outcome.status = "failed"
    if said:
        outcome.reason = str(said["failed"])
    elif hung:
        outcome.reason = f"hung: no result within {limit_s:g} s"
    else:
        outcome.reason = "its process ended early: " + " | ".join(lines[-_LOG_LINES:])


def _run_process(args: Sequence[str], log: Path, limit_s: float) -> bool:
    """Run the child and kill all that it started; return whether it ended by itself in time."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.child", *args],
            cwd=log.parent,  # MuJoCo logs to the working folder
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.PIPE,  # the child watches it: it closes when this process ends
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return False
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(_REAP_TIMEOUT_S)
            assert process.stdin is not None
            process.stdin.close()
    return True
