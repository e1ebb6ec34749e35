"""The command ``top``: how a run goes that writes its statistics into a folder."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from distcollect.errors import ArgumentError
from distcollect.results import Stats
from distcollect.telemetry.bottleneck import find_bottleneck
from distcollect.telemetry.display import log_line, rendered
from distcollect.telemetry.stats_file import newest, stats_file

_LOOK_EVERY_S = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="the run_dir of its Monitor")
    parser.add_argument("--once", action="store_true", help="print the newest state once, as text")


def run(given: argparse.Namespace) -> int:
    """Show the run until it has ended, or until Ctrl-C; 0."""
    news = news_of(given.run_dir)
    if given.once or not sys.stdout.isatty():
        print(f"{news.age()}{log_line(news.stats)}\n{find_bottleneck(news.stats)}")
        return 0
    try:
        _follow(given.run_dir, news)
    except KeyboardInterrupt:
        print()
    return 0


@dataclass(frozen=True)
class News:
    """The newest that a run has said of itself.

    Attributes:
        stats: what.
        said_at: when, in seconds since 1970.
    """

    stats: Stats
    said_at: float

    def age(self) -> str:
        """How old it is, in words; nothing if the run has ended."""
        if self.stats.ended:
            return ""
        return f"{max(0.0, time.time() - self.said_at):.0f} s ago: "


def news_of(run: Path) -> News:
    """What the last whole line says of a run; ``run`` is its folder, or the file itself.

    Raises:
        ArgumentError: there is none.
    """
    file = stats_file(run)
    told = newest(file)
    if told is None:
        raise ArgumentError(
            f"{file} says nothing yet of a run: if one has only just begun, try again in some "
            "seconds; else name the folder that was the run's run_dir"
        )
    return News(Stats.from_dict(told), told["time"])


def _follow(run: Path, news: News) -> None:
    from rich.console import Console, Group  # noqa: PLC0415 - only where there is a terminal
    from rich.live import Live  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    console = Console()
    with Live(console=console, auto_refresh=False) as live:
        while True:
            lines = [] if news.stats.ended else [Text(f"{run}, {news.age()}")]
            live.update(Group(*lines, rendered(news.stats, console.height - 1)), refresh=True)
            if news.stats.ended:
                return
            time.sleep(_LOOK_EVERY_S)
            news = news_of(run)
