"""The command ``top``: shows a run that writes statistics to a folder."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from distcollect.errors import ArgumentError
from distcollect.results import Stats
from distcollect.telemetry.bottleneck import find_bottleneck
from distcollect.telemetry.display import fault_line, log_line, rendered
from distcollect.telemetry.stats_file import newest, stats_file

_LOOK_EVERY_S = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="the run's run_dir")
    parser.add_argument("--once", action="store_true", help="print the statistics once, as text")


def run(given: argparse.Namespace) -> int:
    """Show the run until it ends, or until Ctrl-C."""
    reading = read_newest(given.run_dir)
    if given.once or not sys.stdout.isatty():
        stats = reading.stats
        print(f"{reading.age()}{log_line(stats)}\n{find_bottleneck(stats)}")
        for fault in stats.env_faults:
            print(f"env fault: {fault_line(fault)}")
        return 0
    try:
        _follow(given.run_dir, reading)
    except KeyboardInterrupt:
        print()
    return 0


@dataclass(frozen=True)
class Reading:
    """The newest statistics of a run.

    Attributes:
        stats: the statistics.
        written_at: when they were written, in seconds since 1970.
    """

    stats: Stats
    written_at: float

    def age(self) -> str:
        """Their age in words; "" if the run has ended."""
        if self.stats.ended:
            return ""
        return f"{max(0.0, time.time() - self.written_at):.0f} s ago: "


def read_newest(run: Path) -> Reading:
    """The last snapshot in a run's folder; ``run`` may also be the file itself.

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
    return Reading(Stats.from_dict(snapshot), snapshot["time"])


def _follow(run: Path, reading: Reading) -> None:
    from rich.console import Console, Group  # noqa: PLC0415 - only where there is a terminal
    from rich.live import Live  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    console = Console()
    with Live(console=console, auto_refresh=False) as live:
        while True:
            lines = [] if reading.stats.ended else [Text(f"{run}, {reading.age()}")]
            live.update(Group(*lines, rendered(reading.stats, console.height - 1)), refresh=True)
            if reading.stats.ended:
                return
            time.sleep(_LOOK_EVERY_S)
            reading = read_newest(run)
