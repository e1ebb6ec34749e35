"""Curves and timelines as SVG; the page's style gives their colors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 760, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 10, 26
_LANE = 18


class Curve(NamedTuple):
    """A named curve.

    Attributes:
        name: its name for the legend.
        style: a class of the page's style, "a" or "b".
        at: points (x, y), x rising; None breaks the curve.
    """

    name: str
    style: str
    at: Sequence[tuple[float, float] | None]


def short(value: float) -> str:
    """Return a number in a few characters, such as 12.3k for 12300."""
    value = float(f"{value:.3g}")  # 999.6 is 1k
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}"


def duration(seconds: float) -> str:
    """Return a duration in a few characters, such as 1:30 min for 90 seconds."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}:{rest:02} min"
    if minutes < 2 * 24 * 60:
        return f"{minutes // 60}:{minutes % 60:02} h"
    return f"{minutes / 60 / 24:.3g} d"


def ticks(low: float, high: float, count: int) -> list[float]:
    """Return about ``count`` round numbers from ``low`` to ``high``."""
    span = high - low
    if span <= 0:
        return [low]
    raw = span / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _time_ticks(end_s: float) -> list[float]:
    steps = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 21600, 86400]
    step = next((s for s in steps if end_s / s <= 8), 86400 * math.ceil(end_s / 86400 / 8))
    return [i * step for i in range(int(end_s / step) + 1)]


class _Scale(NamedTuple):
    low: float
    high: float
    begin: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / ((self.high - self.low) or 1.0)
        return self.begin + share * (self.end - self.begin)


def _svg(height: float, about: str, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(about)}">'
        f"{''.join(parts)}</svg>"
    )


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return f'<line class="{style}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _frame(x: _Scale, y: _Scale, across: Mapping[float, str], up: Mapping[float, str]) -> list[str]:
    parts = [_line(x.begin, y(v), x.end, y(v), "grid") for v in up]
    parts += [_text(x.begin - 8, y(v) + 4, name, "end") for v, name in up.items()]
    parts += [_text(x(v), y.begin + 18, name) for v, name in across.items()]
    return [*parts, _line(x.begin, y.begin, x.end, y.begin, "axis")]


def curves(about: str, given: Sequence[Curve], end_s: float, *, from_zero: bool = True) -> str:
    """Return curves over the time of a run; hovering over a point shows its values."""
    points = [point for curve in given for point in curve.at if point is not None]
    if not points:
        return '<p class="none">Nothing was measured.</p>'
    lows, highs = min(p[1] for p in points), max(p[1] for p in points)
    low = min(0.0, lows) if from_zero else lows
    high = highs if highs > low else low + 1.0
    x = _Scale(0.0, end_s, _LEFT, WIDTH - _RIGHT)
    y = _Scale(low, high, HEIGHT - _BOTTOM, _TOP)
    parts = _frame(
        x,
        y,
        {t: duration(t) for t in _time_ticks(end_s)},
        {v: short(v) for v in ticks(low, high, 4)},
    )
    for curve in given:
        parts.append(_path(curve, x, y))
        parts += [
            f'<circle class="hover {curve.style}" cx="{x(p[0]):.1f}" '
            f'cy="{y(p[1]):.1f}" r="4">'
            f"<title>{escape(curve.name)}: {short(p[1])} after {duration(p[0])}</title></circle>"
            for p in curve.at
            if p is not None
        ]
    return _svg(HEIGHT, about, parts)


def _path(curve: Curve, x: _Scale, y: _Scale) -> str:
    steps: list[str] = []
    for point, before in zip(curve.at, [None, *curve.at], strict=False):
        if point is not None:
            at = f"{x(point[0]):.1f} {y(point[1]):.1f}"
            steps.append(f"L{at}" if before else f"M{at}h0")  # a point alone is a dot
    return f'<path class="curve {curve.style}" d="{"".join(steps)}"/>'


def lanes(
    about: str, given: Mapping[str, Sequence[tuple[float, float, str, str]]], end_s: float
) -> str:
    """Return timelines: the states of each row over the time of a run.

    Args:
        about: what it shows.
        given: maps the name of a row to its states: begin, end, a class of the page's style, and
            what to show while hovering.
        end_s: how long the run took.
    """
    height = _TOP + _LANE * len(given) + _BOTTOM
    x = _Scale(0.0, end_s, _LEFT, WIDTH - _RIGHT)
    y = _Scale(0.0, 1.0, height - _BOTTOM, _TOP)
    parts = _frame(x, y, {t: duration(t) for t in _time_ticks(end_s)}, {})
    for row, (name, states) in enumerate(given.items()):
        top = _TOP + _LANE * row
        parts.append(_text(_LEFT - 8, top + 12, name, "end"))
        # One for every two pixels: others would be invisible, and the page should stay small.
        apart = {(round(x(each[0]) / 2), round(x(each[1]) / 2), each[2]): each for each in states}
        parts += [
            f'<rect class="state {escape(style)}" x="{x(begin):.1f}" y="{top + 3}" '
            f'width="{max(2.0, x(end) - x(begin)):.1f}" height="{_LANE - 6}">'
            f"<title>{escape(tooltip)}</title></rect>"
            for begin, end, style, tooltip in apart.values()
        ]
    return _svg(height, about, parts)
