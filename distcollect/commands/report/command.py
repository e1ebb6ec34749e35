"""``distcollect report``: makes an HTML page from the statistics of a run."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

from distcollect.commands.argtypes import declare
from distcollect.commands.report.history import read
from distcollect.commands.report.page import page
from distcollect.common.refusing import refusing
from distcollect.telemetry.stats_file import STATS_FILE, stats_file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add = partial(declare, parser.add_argument)
    add("folder RUN", f"the folder in Monitor(run_dir=...), with {STATS_FILE}", type=Path)
    add("--out FILE", "the page to write (default: report.html in that folder)", type=Path)


def run(given: argparse.Namespace) -> int:
    """Write the page.

    Raises:
        ArgumentError: there are no statistics, or the page can't be written.
    """
    file = stats_file(given.folder)
    out = given.out or file.parent / "report.html"
    text = page(read(file), file.resolve().parent.name)
    with refusing(f"--out {out} can't be written", "name another file"):
        out.write_text(text, encoding="utf-8")
    print(f"distcollect report: {out}", file=sys.stderr)
    return 0
