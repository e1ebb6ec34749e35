"""The command ``bench``: measures distcollect beside a bare loop and other collectors."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.contenders import CONTENDERS
from benchmarks.items import ITEMS, Item, Part
from benchmarks.report import as_json, draw, table, targets_table
from benchmarks.runner import Outcome, run_item
from distcollect.commands.argtypes import above_0, count
from distcollect.errors import ArgumentError

_QUICK_ITEMS = ("cartpole-16",)
_QUICK_CONTENDERS = ("bare", "bare-x2", "sync", "rpc-async-x2")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--workload",
        action="append",
        metavar="NAME",
        help="a workload or another figure, see --list; can be given several times (default: all)",
    )
    parser.add_argument(
        "--contender",
        action="append",
        metavar="NAME",
        help="what to measure on workloads; can be given several times (default: all)",
    )
    parser.add_argument("--repeats", type=count, help="number of repeats (default: 3)")
    parser.add_argument(
        "--seconds", type=above_0, help="length of each measurement, in seconds (default: 3)"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="only check that it works: one repeat of 0.3 s, on one workload if none is named; the "
        "figures mean nothing",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write all measurements to this file"
    )
    parser.add_argument("--png", type=Path, metavar="FILE", help="plot the workloads to this file")
    parser.add_argument("--list", action="store_true", help="list all that can be measured")


def run(given: argparse.Namespace) -> int:
    """Measure and print tables.

    Returns:
        0; or 1 if a measurement failed. One that needs a missing package doesn't count as failed.

    Raises:
        ArgumentError: a name is unknown, or a file can't be written.
    """
    if given.list:
        _list()
        return 0
    selected = select(given.workload, given.contender, quick=given.quick)
    _check_files(given.json, given.png)
    repeats = given.repeats or (1 if given.quick else 3)
    seconds = given.seconds or (0.3 if given.quick else 3.0)
    results: dict[str, dict[str, Outcome]] = {}
    for item, parts in selected:
        results[item.name] = run_item(
            item, parts, repeats=repeats, seconds=seconds, progress=_progress
        )
        _progress("")
        print(table(item, results[item.name]), flush=True)
    print(targets_table(results), flush=True)
    options = {"repeats": repeats, "seconds": seconds, "quick": given.quick}
    if given.json is not None:
        given.json.write_text(as_json(results, options) + "\n")
    failed = any(o.status == "failed" for parts in results.values() for o in parts.values())
    if given.png is not None:
        try:
            draw(results, given.png)
        except (ModuleNotFoundError, ValueError) as error:
            print(f"distcollect bench: no chart: {error}", file=sys.stderr)
            return 1
    return int(failed)


def select(
    items: Sequence[str] | None, contenders: Sequence[str] | None, *, quick: bool = False
) -> list[tuple[Item, Sequence[Part]]]:
    """Choose what to measure.

    Raises:
        ArgumentError: a name is unknown, or no contender is measured on the chosen items.
    """
    if quick and items is None:
        items = _QUICK_ITEMS
        contenders = contenders or _QUICK_CONTENDERS
    _check("workload", items, ITEMS)
    _check("contender", contenders, CONTENDERS)
    selected: list[tuple[Item, Sequence[Part]]] = []
    for item in ITEMS.values():
        if items is not None and item.name not in items:
            continue
        parts = [
            part
            for part in item.parts
            if contenders is None or not item.is_workload or part.name in contenders
        ]
        # Contenders without workloads mean all workloads, and no other figures.
        if parts and (item.is_workload or items is not None or contenders is None):
            selected.append((item, parts))
    if not selected:
        raise ArgumentError(
            f"none of --contender {', '.join(contenders or ())} is measured on --workload "
            f"{', '.join(items or ())}: --list shows what can be measured"
        )
    return selected


def _check(what: str, names: Sequence[str] | None, there: dict[str, object] | object) -> None:
    assert isinstance(there, dict)
    for name in names or ():
        if name not in there:
            raise ArgumentError(f"--{what} {name}: unknown; there are: {', '.join(there)}")


def _check_files(json_file: Path | None, png_file: Path | None) -> None:
    """Check before an hour of measuring that its results can be written."""
    for option, file in (("--json", json_file), ("--png", png_file)):
        if file is None:
            continue
        try:
            file.open("ab").close()
        except OSError as error:
            raise ArgumentError(
                f"{option} {file}: {error.strerror}; name a file in a folder that exists"
            ) from error
    if png_file is not None and importlib.util.find_spec("matplotlib") is None:
        raise ArgumentError(
            "--png needs matplotlib, which isn't installed: pip install 'distcollect[bench]', or "
            "leave it out"
        )


def _list() -> None:
    print("workloads and other figures (--workload)")
    for item in ITEMS.values():
        print(f"  {item.name:24}{item.about}")
    print("\ncontenders (--contender)")
    for contender in CONTENDERS.values():
        print(f"  {contender.name:24}{contender.about}")


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
