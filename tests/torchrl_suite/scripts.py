"""Runs TorchRL's own training scripts, with small budgets, with the collectors of this package.

::

    pip install hydra-core tqdm matplotlib psutil tensorboard "gymnasium[mujoco,atari]" \\
        torchvision pettingzoo[mpe] vmas
    python tests/torchrl_suite/scripts.py /tmp/rl                # all, with ours
    python tests/torchrl_suite/scripts.py /tmp/rl sac dqn        # names that contain one of these
    python tests/torchrl_suite/scripts.py /tmp/rl --theirs       # with TorchRL's collectors
    python tests/torchrl_suite/scripts.py /tmp/rl --both         # with TorchRL's, then with ours
    python tests/torchrl_suite/scripts.py /tmp/rl --compare 2    # longer, alternately with both

The argument is a checkout of pytorch/rl. The folder of each script is copied, and in the copy each
import of a collector from ``torchrl.collectors`` becomes one from ``distcollect``, as in
``yardstick.py``. The scripts of TorchRL's ``Trainer`` import no collector, but name its class in
their configuration, and so there the name is changed. Budgets are made small by arguments of the
script, or where it has none in its text (``script_list.py``). The result is a table in Markdown.

``--both`` runs with our collectors what ran with TorchRL's. It shows frames per CPU second of both,
and which entries of the first batch differ, apart from the three that each of our frames has in
addition.

``--compare`` runs each script that has a longer budget so many times with each of the two. It
shows frames per second, and per second of CPU time of the script's process, from the first batch to
the last, training included; and the mean return of the last 50 episodes.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from script_list import SCRIPTS, Script
from yardstick import our_names, plain_environment, swapped

LIMIT_S = 600
LONG_LIMIT_S = 1800
# What each frame has with our collectors only.
_ADDITIONAL = {
    "collector",
    *(f"collector/{name}" for name in ("policy_version", "worker_id", "faulted")),
}


@dataclass(frozen=True)
class Outcome:
    """What a run of a script gave.

    Attributes:
        succeeded: whether it ended without an error.
        seconds: how long it ran.
        last: the last line that it printed; if there is one, the last error.
        figures: what ``count_frames.py`` counted.
    """

    succeeded: bool
    seconds: float
    last: str
    figures: dict[str, Any] = field(default_factory=dict)


def run(
    script: Script,
    checkout: Path,
    ours: frozenset[str],
    *,
    long: bool = False,
    log: Path | None = None,
) -> Outcome:
    """Run a script, with the collectors whose names are in ``ours`` from this package."""
    with tempfile.TemporaryDirectory(prefix="scripts-") as name:
        main = copy_script(script, checkout, Path(name) / "copy", ours)
        counted = Path(name) / "figures.json"
        arguments = [*script.args, *(script.long if long else ())]
        if ours and script.collector:
            arguments.append(f"collector._target_=distcollect.{script.collector}")
        environment = plain_environment(
            MPLBACKEND="Agg",
            WANDB_MODE="disabled",
            FRAMES_FILE=str(counted),
            FRAMES_OF="distcollect" if ours else "torchrl",
        )
        begin = time.monotonic()
        returncode, output = _execute(
            [main.name, *arguments], main.parent, environment, LONG_LIMIT_S if long else LIMIT_S
        )
        seconds = time.monotonic() - begin
        figures = json.loads(counted.read_text()) if counted.exists() else {}
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(output)
    lines = [line for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return Outcome(returncode == 0, seconds, (errors or lines or [""])[-1], figures)


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
    main.write_text(_counting(main.read_text()))
    return main


def _counting(source: str) -> str:
    """Python code that imports ``count_frames`` first."""
    first = next(node for node in ast.parse(source).body if not _must_be_first(node))
    lines = source.splitlines(keepends=True)
    lines.insert(first.lineno - 1, "import count_frames  # noqa\n")
    return "".join(lines)


def _must_be_first(node: ast.stmt) -> bool:
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_text or (isinstance(node, ast.ImportFrom) and node.module == "__future__")


def show_whether_they_run(given: argparse.Namespace, scripts: dict[str, Script]) -> None:
    """Print a row for each script: whether it runs, and its last line if it doesn't."""
    ours = frozenset() if given.theirs else our_names()
    print("| script | runs | otherwise |\n|---|---|---|", flush=True)
    for name, script in scripts.items():
        outcome = run(script, given.checkout, ours, log=_log(given, name))
        note = "" if outcome.succeeded else outcome.last[:200].replace("|", "/")
        runs = "yes" if outcome.succeeded else "no"
        print(f"| {_shown(name, script)} | {runs} | {note} |", flush=True)


def _shown(name: str, script: Script) -> str:
    """The path of a script, with what its name says beyond that."""
    path = script.path.removeprefix("tutorials/sphinx-tutorials/")
    *_, variant = name.rpartition(", ")
    return f"`{path}`" + (f", {variant}" if ", " in name else "")


def _log(given: argparse.Namespace, name: str) -> Path | None:
    return None if given.logs is None else given.logs / f"{name.replace(' ', '-')}.txt"


def show_both(given: argparse.Namespace, scripts: dict[str, Script]) -> None:
    """Print a row for each script: whether it runs with TorchRL's collectors, and with ours."""
    print("| script | TorchRL | ours | frames per CPU second | first batch | otherwise |")
    print("|---|---|---|---|---|---|", flush=True)
    for name, script in scripts.items():
        outcomes = []
        for ours in (frozenset(), our_names()):
            log = _log(given, f"{name} {'ours' if ours else 'theirs'}")
            outcomes.append(run(script, given.checkout, ours, log=log))
            if not outcomes[-1].succeeded:
                break
        last = outcomes[-1]
        row = (
            _shown(name, script),
            "yes" if outcomes[0].succeeded else "no",
            "-" if len(outcomes) == 1 else "yes" if last.succeeded else "no",
            ", ".join(_frames_per_cpu_second(outcome) for outcome in outcomes),
            _differences(*(outcome.figures.get("first") or {} for outcome in outcomes)),
            "" if last.succeeded else last.last[:200].replace("|", "/"),
        )
        print(f"| {' | '.join(row)} |", flush=True)


def _frames_per_cpu_second(outcome: Outcome) -> str:
    figures = outcome.figures
    return f"{figures['frames'] / figures['cpu_seconds']:.0f}" if figures.get("frames") else "?"


def _differences(theirs: dict[str, str], ours: dict[str, str] | None = None) -> str:
    """What differs between the first batches; empty if nothing does."""
    if ours is None:
        return ""
    names = [name for name in {**theirs, **ours} if name not in _ADDITIONAL]
    texts = [
        f"{name or 'batch'}: {theirs.get(name)} -> {ours.get(name)}"
        for name in names
        if theirs.get(name) != ours.get(name)
    ]
    return "; ".join(texts) or ("the same" if ours else "none")


def compare(given: argparse.Namespace, scripts: dict[str, Script]) -> None:
    """Print a row for each script that has a longer budget: our figures beside TorchRL's."""
    print("| script | frames | frames/s | frames per CPU second | return | return, TorchRL |")
    print("|---|---|---|---|---|---|", flush=True)
    for name, script in scripts.items():
        if not script.long:
            continue
        seen: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
        for turn in range(2 * given.compare):
            is_ours = turn % 4 in (0, 3)
            names = our_names() if is_ours else frozenset()
            outcome = run(script, given.checkout, names, long=True, log=_log(given, name))
            if not outcome.succeeded or not outcome.figures.get("frames"):
                print(f"| {_shown(name, script)} | {outcome.last[:200]} |", flush=True)
                break
            seen[is_ours].append(outcome.figures)
        else:
            row = (
                _shown(name, script),
                str(seen[True][0]["frames"]),
                f"{_rate(seen[True], 'seconds') / _rate(seen[False], 'seconds'):.2f}",
                f"{_rate(seen[True], 'cpu_seconds') / _rate(seen[False], 'cpu_seconds'):.2f}",
                ", ".join(_number(figures["return"]) for figures in seen[True]),
                ", ".join(_number(figures["return"]) for figures in seen[False]),
            )
            print(f"| {' | '.join(row)} |", flush=True)


def _rate(runs: Sequence[dict[str, Any]], unit: str) -> float:
    return statistics.median(figures["frames"] / figures[unit] for figures in runs)


def _number(value: float | None) -> str:
    return "?" if value is None else f"{value:.3g}"


def _means(given: str, name: str) -> bool:
    return given == name if given in SCRIPTS else given in name


def main() -> None:
    """Run the scripts, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("checkout", type=Path, help="a checkout of pytorch/rl")
    parser.add_argument("name", nargs="*", help="only scripts whose names contain one of these")
    parser.add_argument("--theirs", action="store_true", help="with TorchRL's own collectors")
    parser.add_argument("--both", action="store_true", help="with TorchRL's, then with ours")
    parser.add_argument("--compare", type=int, metavar="N", help="N longer runs with each")
    parser.add_argument("--logs", type=Path, help="a folder for what the scripts print")
    given = parser.parse_args()
    scripts = {
        name: script
        for name, script in SCRIPTS.items()
        if not given.name or any(_means(part, name) for part in given.name)
    }
    show = compare if given.compare else show_both if given.both else show_whether_they_run
    show(given, scripts)


if __name__ == "__main__":
    main()
