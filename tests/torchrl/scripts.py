"""Runs TorchRL's own training scripts, with tiny budgets, with the collectors of this package.

::

    pip install hydra-core tqdm matplotlib psutil tensorboard "gymnasium[mujoco]"
    python tests/torchrl/scripts.py /tmp/rl                 # all, with ours
    python tests/torchrl/scripts.py /tmp/rl sac dqn         # those whose names contain one of these
    python tests/torchrl/scripts.py /tmp/rl --theirs        # with TorchRL's collectors

The argument is a checkout of pytorch/rl. The folder of each script is copied, and in the copy each
import of a collector from ``torchrl.collectors`` becomes one from ``distcollect``, as in
``yardstick.py``. Budgets are made small by arguments of the script, or where it has none in its
text. The result is a table in Markdown.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from script_list import SCRIPTS, Script
from yardstick import our_names, plain_environment, swapped

LIMIT_S = 240


def run(
    script: Script, checkout: Path, ours: frozenset[str], log: Path | None = None
) -> tuple[bool, float, str]:
    """Run a script; returns whether it succeeded, its seconds, and its last line."""
    with tempfile.TemporaryDirectory(prefix="scripts-") as name:
        folder = Path(name) / "copy"
        main = copy_script(script, checkout, folder, ours)
        named = f"collector._target_=distcollect.{script.collector}"
        arguments = [*script.args, *([named] if ours and script.collector else [])]
        begin = time.monotonic()
        with subprocess.Popen(
            [sys.executable, main.name, *arguments],
            cwd=folder,
            env=plain_environment(MPLBACKEND="Agg", WANDB_MODE="disabled"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                output, _ = process.communicate(timeout=LIMIT_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                output = process.communicate()[0] + f"\nnot done after {LIMIT_S} s"
        seconds = time.monotonic() - begin
    if log is not None:
        log.write_text(output)
    lines = [line for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|exceptions\.\w+)\b", line)]
    return process.returncode == 0, seconds, (errors or lines or [""])[-1]


def copy_script(script: Script, checkout: Path, folder: Path, ours: frozenset[str]) -> Path:
    """Copy the folder of a script, with the imports of ``ours`` swapped; returns the script."""
    source = checkout / script.path
    shutil.copytree(source.parent, folder, ignore=shutil.ignore_patterns("media", "*.gif"))
    for path in folder.rglob("*.py"):
        path.write_text(swapped(path.read_text(), ours))
    main = folder / source.name
    text = main.read_text()
    for pattern, replacement in script.edits:
        text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
    main.write_text(text)
    return main


def main() -> None:
    """Run the scripts, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("checkout", type=Path, help="a checkout of pytorch/rl")
    parser.add_argument("name", nargs="*", help="only scripts whose names contain one of these")
    parser.add_argument("--theirs", action="store_true", help="with TorchRL's own collectors")
    parser.add_argument("--logs", type=Path, help="a folder for what the scripts print")
    given = parser.parse_args()
    if given.logs is not None:
        given.logs.mkdir(parents=True, exist_ok=True)
    ours = frozenset() if given.theirs else our_names()
    print("| script | runs | seconds | |\n|---|---|---|---|", flush=True)
    for name, script in SCRIPTS.items():
        if given.name and not any(part in name for part in given.name):
            continue
        log = given.logs / f"{name.replace(' ', '-')}.txt" if given.logs is not None else None
        succeeded, seconds, last = run(script, given.checkout, ours, log)
        note = "" if succeeded else last[:200].replace("|", "/")
        runs = "yes" if succeeded else "no"
        print(f"| {name} | {runs} | {seconds:.0f} | {note} |", flush=True)


if __name__ == "__main__":
    main()
