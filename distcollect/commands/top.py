"""The command ``top``: shows a run that writes statistics to a folder."""

from __future__ import annotations

import argparse
import re
import sys
import time
from functools import partial
from pathlib import Path

from distcollect.commands.argtypes import declare
from distcollect.errors import ArgumentError
from distcollect.results import Stats
from distcollect.telemetry.bottleneck import find_bottleneck
from distcollect.telemetry.display import fault_line, log_line, rendered
from distcollect.telemetry.stats_file import newest, stats_file

_LOOK_EVERY_S = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add = partial(declare, parser.add_argument)
    add("run_dir RUN", "the folder in Monitor(run_dir=...)", type=Path)
    add("--once", "print the statistics once, as text", action="store_true")


def run(given: argparse.Namespace) -> int:
    """Show the run until it ends, or until Ctrl-C."""
    stats, age = read_newest(given.run_dir)
    if given.once or not sys.stdout.isatty():
        print(f"{age}{log_line(stats)}\n{find_bottleneck(stats)}")
        # Of those that differ by numbers only, such as the env's, the last one.
        kinds = [re.sub(r"\d+", "", fault.message) for fault in stats.env_faults]
        for kind, fault in dict(zip(kinds, stats.env_faults, strict=True)).items():
            number = kinds.count(kind)
            alike = f", the last of {number} alike" if number > 1 else ""
            print(f"env fault{alike}: {fault_line(fault)}")
        return 0
    try:
        _follow(given.run_dir)
    except KeyboardInterrupt:
        print()
    return 0


def read_newest(run: Path) -> tuple[Stats, str]:
    """Return the last snapshot in a run's folder, and its age in words.

    Args:
        run: the folder, or the file itself.

    Returns:
        The statistics, and for example "written 3 s ago: "; "" if the run has ended.

    Raises:
        ArgumentError: there is none.
    """
    file = stats_file(run)
    snapshot = newest(file)
    if snapshot is None:
        raise ArgumentError(
            f"{file} holds no statistics yet: if the run has only just begun, try again in some "
            "seconds; otherwise name the folder in Monitor(run_dir=...)"
        )
    stats = Stats.from_dict(snapshot)
    age_s = max(0.0, time.time() - snapshot["time"])
    return stats, "" if stats.ended else f"written {age_s:.0f} s ago: "


def _follow(run: Path) -> None:
    from rich.console import Console, Group  # noqa: PLC0415 - only where there is a terminal
    from rich.live import Live  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    console = Console()
    with Live(console=console, auto_refresh=False) as live:
        while True:
            stats, age = read_newest(run)
            lines = [Text(f"{run}, {age}")] if age else []
            live.update(Group(*lines, rendered(stats, console.height - 1)), refresh=True)
            if stats.ended:
                return
            time.sleep(_LOOK_EVERY_S)
