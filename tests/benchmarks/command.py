"""Measures distcollect beside bare loops and other collectors, each in a process of its own."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial

import torch

import distcollect
from benchmarks.items import ITEMS, Part
from benchmarks.runner import Outcome, run_item
from distcollect.commands.argtypes import above_0, count, declare, writable
from distcollect.commands.bench import show_progress
from distcollect.common.tables import text_table
from distcollect.errors import ArgumentError

_REASON_WIDTH = 120


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add = partial(declare, parser.add_argument)
    add("--workload NAME", "what to measure, see --list; also several times", action="append")
    add("--part NAME", "which parts of it (default: all); also several times", action="append")
    add("--repeats N", "number of repeats", type=count, default=3)
    add("--seconds S", "length of each window", type=above_0, default=3.0)
    add("--json FILE", "write all figures to this file", type=writable)
    add("--list", "list all that can be measured", action="store_true")


def run(given: argparse.Namespace) -> int:
    """Measure and print tables; 1 if a measurement failed, as none does for a missing package.

    Raises:
        ArgumentError: a name is unknown.
    """
    if given.list:
        for name, item in ITEMS.items():
            print(f"{name:15}{item.about}\n{'':15}  {', '.join(item.parts)}")
        return 0
    selected = select(given.workload, given.part)
    results: dict[str, dict[str, Outcome]] = {}
    for name, parts in selected.items():
        results[name] = run_item(
            name, parts, repeats=given.repeats, seconds=given.seconds, progress=show_progress
        )
        show_progress("")
        print(table(name, results[name]), flush=True)
    if given.json is not None:
        items = {
            item: {part: asdict(outcome) for part, outcome in outcomes.items()}
            for item, outcomes in results.items()
        }
        given.json.write_text(json.dumps({"machine": machine(), "items": items}, indent=1))
    return int(any(o.status == "failed" for parts in results.values() for o in parts.values()))


def select(items: Sequence[str] | None, names: Sequence[str] | None) -> dict[str, dict[str, Part]]:
    """The parts of these names, by item; None: all.

    Raises:
        ArgumentError: a name is unknown.
    """
    known = {part for item in ITEMS.values() for part in item.parts}
    for what, given, there in (("workload", items, ITEMS), ("part", names, sorted(known))):
        for name in given or ():
            if name not in there:
                raise ArgumentError(f"--{what} {name}: unknown; there are: {', '.join(there)}")
    selected = {
        name: {part: each for part, each in item.parts.items() if names is None or part in names}
        for name, item in ITEMS.items()
        if items is None or name in items
    }
    return {name: parts for name, parts in selected.items() if parts}


def table(item: str, outcomes: Mapping[str, Outcome]) -> str:
    """A table of an item's parts: medians, and ratios to the limit within each repeat."""
    rows = [["", "median", "/ limit", "min .. max", ""]]
    for name, outcome in outcomes.items():
        part = ITEMS[item].parts[name]
        if outcome.status != "ok":
            reason = (outcome.reason.splitlines() or [""])[0][:_REASON_WIDTH]
            rows.append([part.about, "-", "-", "", f"{outcome.status}: {reason}"])
            continue
        for value in outcome.values[0] or ():
            median = statistics.median(values[value] for values in outcome.values if values)
            limit = outcomes.get(part.baseline or "")
            ratios = paired(outcome, limit) if limit and value == "frames_per_s" else []
            middle = f"{statistics.median(ratios):.3f}" if ratios else "-"
            spread = f"{min(ratios):.3f} .. {max(ratios):.3f}" if ratios else ""
            rows.append([part.about, f"{median:.4g}", middle, spread, value])
    return f"\n{item}: {ITEMS[item].about}\n{text_table(rows, left=(0, 4))}"


def paired(above: Outcome, below: Outcome) -> list[float]:
    """Frames/s over those of the limit in the same repeat, where both were measured."""
    both = zip(above.values, below.values, strict=True)
    return [x["frames_per_s"] / y["frames_per_s"] for x, y in both if x and y]


def machine() -> dict[str, object]:
    """This machine, its load and its versions."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "distcollect": distcollect.__version__,
    }
