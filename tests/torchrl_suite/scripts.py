"""Runs TorchRL's own training scripts, with small budgets, with the collectors of this package.

The folder of a script is copied, and in the copy each import of a collector from
``torchrl.collectors`` becomes one from ``distcollect``, as in ``yardstick.py``. The scripts of
TorchRL's ``Trainer`` import no collector, but name its class in their configuration, and so there
the name is changed. Budgets are made small by arguments of the script, or where it has none in its
text (``script_list.py``).
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from script_list import Script
from yardstick import plain_environment, swapped

LIMIT_S = 600


@dataclass(frozen=True)
class Outcome:
    """What a run of a script gave.

    Attributes:
        succeeded: whether it ended without an error.
        last: the last line that it printed; if there is one, the last error.
    """

    succeeded: bool
    last: str


def run(
    script: Script,
    checkout: Path,
    ours: frozenset[str],
    *,
    log: Path | None = None,
) -> Outcome:
    """Run a script, with the collectors whose names are in ``ours`` from this package."""
    with tempfile.TemporaryDirectory(prefix="scripts-") as name:
        main = copy_script(script, checkout, Path(name) / "copy", ours)
        arguments = list(script.args)
        if ours and script.collector:
            arguments.append(f"collector._target_=distcollect.{script.collector}")
        environment = plain_environment(MPLBACKEND="Agg", WANDB_MODE="disabled")
        returncode, output = _execute([main.name, *arguments], main.parent, environment, LIMIT_S)
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(output)
    lines = [line for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return Outcome(returncode == 0, (errors or lines or [""])[-1])


def _execute(
    arguments: Sequence[str], folder: Path, environment: dict[str, str], limit_s: float
) -> tuple[int, str]:
    """Run Python; returns the exit status and what it printed. What it started ends with it."""
    with subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output = process.communicate()[0] + f"\nnot done after {limit_s:g} s"
    return process.returncode, output


def copy_script(script: Script, checkout: Path, folder: Path, ours: frozenset[str]) -> Path:
    """Copy the folder of a script, with the imports of ``ours`` swapped; returns the script."""
    source = checkout / script.path
    shutil.copytree(source.parent, folder, ignore=shutil.ignore_patterns("media", "*.gif"))
    for path in folder.rglob("*.py"):
        path.write_text(swapped(path.read_text(), ours))
    main = folder / source.name
    for path in (main, *folder.rglob("*.yaml")):
        text = path.read_text()
        for pattern, replacement in script.edits:
            text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
        path.write_text(text)
    return main
