"""Tables, a JSON file and a bar chart of what was measured."""

from __future__ import annotations

import importlib
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

import gymnasium as gym
import torch

import distcollect
from benchmarks.items import ITEMS, Item
from benchmarks.runner import Outcome
from benchmarks.stats import Spread, paired
from benchmarks.targets import TARGETS, Results, Target
from distcollect.common.tables import text_table

Outcomes: TypeAlias = "Mapping[str, Outcome]"

_REASON_WIDTH = 120
_OURS, _PEER, _LIMIT = "#1f6fb2", "#b9bfc7", "#4d4d4d"


def table(item: Item, outcomes: Outcomes) -> str:
    """A table of an item's parts: medians, and ratios to the limit within each repeat."""
    rows: list[tuple[str, ...]] = [("", "median", "/ limit", "min .. max", "")]
    for name, outcome in outcomes.items():
        about = item.part(name).about
        if outcome.status != "ok":
            rows.append((about, "-", "-", "", f"{outcome.status}: {_short(outcome.reason)}"))
            continue
        for value, spread in spreads(outcome).items():
            ratio = ratio_to_limit(item, outcomes, name) if value == "frames_per_s" else None
            rows.append(
                (
                    about,
                    f"{spread.median:.4g}",
                    f"{ratio.median:.3f}" if ratio else "-",
                    f"{ratio.low:.3f} .. {ratio.high:.3f}" if ratio else "",
                    value,
                )
            )
    return f"\n{item.name}: {item.about}\n{text_table(rows, left=(0, 4))}"


def targets_table(results: Results) -> str:
    """A table of the targets that were measured."""
    rows: list[tuple[str, ...]] = [("target", "", "median", "min .. max", "")]
    for target in TARGETS:
        ratio = target.ratios(results)
        if ratio is not None:
            rows.append(
                (
                    target.what,
                    f"{'>=' if target.at_least else '<='} {target.bound:g}",
                    f"{ratio.median:.3f}",
                    f"{ratio.low:.3f} .. {ratio.high:.3f}",
                    "reached" if target.reached(ratio.median) else "MISSED",
                )
            )
    if len(rows) == 1:
        return "\nNone of the targets was measured."
    return (
        f"\nTargets (paired within {_repeats(results)} repeat(s))\n{text_table(rows, left=(0, 4))}"
    )


def spreads(outcome: Outcome) -> dict[str, Spread]:
    """Median and range of each value, by name."""
    there = [values for values in outcome.values if values is not None]
    names = list(there[0]) if there else []
    found = {name: Spread.of([values[name] for values in there]) for name in names}
    return {name: spread for name, spread in found.items() if spread is not None}


def ratio_to_limit(item: Item, outcomes: Outcomes, part: str) -> Spread | None:
    """A part's frames/s over those of its limit; None if the limit was not measured."""
    baseline = item.part(part).baseline
    if baseline is None or baseline not in outcomes:
        return None
    return Spread.of(paired(_rates(outcomes[part]), _rates(outcomes[baseline])))


def _rates(outcome: Outcome) -> list[float | None]:
    return [None if values is None else values["frames_per_s"] for values in outcome.values]


def _repeats(results: Results) -> int:
    return max(len(outcome.values) for item in results.values() for outcome in item.values())


def _short(reason: str) -> str:
    """The first line of ``reason``, which the JSON file has in full."""
    return (reason.splitlines() or [""])[0][:_REASON_WIDTH]


def as_json(results: Results, options: Mapping[str, Any]) -> str:
    """All measurements, and the machine that made them, as JSON."""
    return json.dumps(
        {
            "machine": machine(),
            "options": dict(options),
            "items": {
                item: {part: asdict(outcome) for part, outcome in outcomes.items()}
                for item, outcomes in results.items()
            },
            "targets": [_as_dict(target, results) for target in TARGETS],
        },
        indent=2,
    )


def _as_dict(target: Target, results: Results) -> dict[str, Any]:
    ratio = target.ratios(results)
    return {
        "what": target.what,
        "bound": target.bound,
        "at_least": target.at_least,
        "ratio": None if ratio is None else asdict(ratio),
        "reached": None if ratio is None else target.reached(ratio.median),
    }


def machine() -> dict[str, Any]:
    """This machine, its load and its versions."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gymnasium": gym.__version__,
        "distcollect": distcollect.__version__,
    }


def draw(results: Results, path: Path) -> None:
    """Plot frames/s over those of the limit: a panel for each workload, a bar for each contender.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: no workload was measured together with its bare loops.
    """
    panels: list[tuple[str, list[tuple[str, Spread]]]] = []
    for name, outcomes in results.items():
        if ITEMS[name].is_workload:
            ratios = {part: ratio_to_limit(ITEMS[name], outcomes, part) for part in outcomes}
            bars = [(part, ratio) for part, ratio in ratios.items() if ratio is not None]
            if bars:
                panels.append((name, bars))
    if not panels:
        raise ValueError("no workload was measured together with its bare loops: nothing to draw")
    figure_module = importlib.import_module("matplotlib.figure")
    columns = min(len(panels), 4)
    lines = -(-len(panels) // columns)
    most = max(len(bars) for _, bars in panels)
    figure = figure_module.Figure(
        figsize=(1.2 + 3.8 * columns, (0.9 + 0.3 * most) * lines + 0.8), layout="constrained"
    )
    axes = figure.subplots(lines, columns, squeeze=False).flatten()
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    for axis, (name, bars) in zip(axes, panels, strict=False):
        _draw_panel(axis, name, bars)
    figure.suptitle("Frames/s as a share of bare loops side by side (median, min to max)")
    figure.savefig(path, dpi=150)


def _draw_panel(axis: Any, name: str, bars: list[tuple[str, Spread]]) -> None:
    names = [part for part, _ in bars]
    medians = [ratio.median for _, ratio in bars]
    spread = [
        [ratio.median - ratio.low for _, ratio in bars],
        [ratio.high - ratio.median for _, ratio in bars],
    ]
    places = range(len(bars))
    axis.barh(places, medians, height=0.7, color=[_color(part) for part in names])
    axis.errorbar(medians, places, xerr=spread, fmt="none", ecolor="black", elinewidth=0.8)
    for place, (_, ratio) in zip(places, bars, strict=True):
        axis.text(ratio.high + 0.02, place, f"{ratio.median:.2f}", va="center", fontsize=8)
    axis.set_yticks(places, names, fontsize=8)
    axis.invert_yaxis()
    axis.axvline(1, color=_LIMIT, linewidth=0.8, linestyle=":")
    axis.set_xlim(0, max(1.2, 1.15 * max(ratio.high for _, ratio in bars)))
    axis.tick_params(axis="x", labelsize=8)
    axis.set_title(name, fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)


def _color(part: str) -> str:
    if part.startswith("bare"):
        return _LIMIT
    return _OURS if part.startswith(("sync", "rpc")) else _PEER
