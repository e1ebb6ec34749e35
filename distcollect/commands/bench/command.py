"""The command ``bench``: its arguments, and what it does with them."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from distcollect.commands.argtypes import above_0, count
from distcollect.commands.bench.contenders import CONTENDERS
from distcollect.commands.bench.items import ITEMS, Item, Part
from distcollect.commands.bench.report import as_json, draw, table, targets_table
from distcollect.commands.bench.runner import Outcome, run_item
from distcollect.errors import ArgumentError

_QUICK_ITEMS = ("cartpole-16",)
_QUICK_CONTENDERS = ("bare", "bare-x2", "sync", "rpc-async-x2")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--workload",
        action="append",
        metavar="NAME",
        help="what to measure, see --list; can be given several times (default: all)",
    )
    parser.add_argument(
        "--contender",
        action="append",
        metavar="NAME",
        help="whom to measure on workloads; can be given several times (default: all)",
    )
    parser.add_argument("--repeats", type=count, help="how often to measure (default: 3)")
    parser.add_argument("--seconds", type=above_0, help="length of each measurement (default: 3)")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="just see that it works: one repeat of 0.3 s, distcollect on one workload if none is "
        "named; its figures mean nothing",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements there")
    parser.add_argument("--png", type=Path, metavar="FILE", help="plot the workloads there")
    parser.add_argument("--list", action="store_true", help="show what there is to measure")


def run(given: argparse.Namespace) -> int:
    """Measure and report; 0 if everything asked for could be measured or was not installed.

    Raises:
        ArgumentError: there is nothing of that name, or what was measured couldn't be written.
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
    """What to measure.

    Raises:
        ArgumentError: a name that there isn't, or nothing is left; says which names there are.
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
        # Who picks contenders without naming workloads wants no other figures.
        if parts and (item.is_workload or items is not None or contenders is None):
            selected.append((item, parts))
    if not selected:
        raise ArgumentError(
            f"none of --contender {', '.join(contenders or ())} is measured on --workload "
            f"{', '.join(items or ())}: --list shows what there is"
        )
    return selected


def _check(what: str, names: Sequence[str] | None, there: dict[str, object] | object) -> None:
    assert isinstance(there, dict)
    for name in names or ():
        if name not in there:
            raise ArgumentError(f"--{what} {name}: unknown; there are: {', '.join(there)}")


def _check_files(json_file: Path | None, png_file: Path | None) -> None:
    """Find out before an hour of measuring whether its figures can be kept."""
    for option, file in (("--json", json_file), ("--png", png_file)):
        if file is None:
            continue
        try:
            file.open("ab").close()
        except OSError as error:
            raise ArgumentError(
                f"{option} {file}: {error.strerror}; name a file in a folder that is there"
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
