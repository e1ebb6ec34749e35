"""The page about a run: one HTML file that loads nothing from elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Sequence
from html import escape

from distcollect.commands.report.charts import Curve, curves, duration, lanes, short
from distcollect.commands.report.history import History
from distcollect.telemetry.figures import FIGURES, Figure

_MAX_LANES = 64
_MAX_FAULTS = 100
_STATES = ("joining", "ready", "suspected", "lost", "left")
_MAX_BARS = 20

_STYLE = """
:root { color-scheme: light dark; --text: #1c2430; --soft: #667085; --paper: #fff; --card: #f6f7f9;
  --grid: #e3e6ea; --a: #2f6fde; --b: #d9730d; --ready: #4c9f70; --joining: #9ec5e8;
  --suspected: #e0a72e; --lost: #c8423b; --left: #a3a9b3; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e8eb; --soft: #98a1ae; --paper: #14171c;
  --card: #1d2127; --grid: #30363f; --a: #6ba1ff; --b: #f0a35e; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 24px 20px 48px; max-width: 860px; color: var(--text);
  background: var(--paper); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 24px; margin: 0; } h2 { font-size: 17px; margin: 30px 0 4px; }
p { margin: 4px 0; } .soft, .none { color: var(--soft); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(120px, 1fr)); gap: 10px;
  margin: 18px 0; }
.tile { background: var(--card); border-radius: 8px; padding: 10px 12px; }
.tile b { display: block; font-size: 20px; font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: 13px; }
.bottleneck { background: var(--card); border-left: 4px solid var(--a); border-radius: 4px;
  padding: 10px 14px; white-space: pre-wrap; }
svg { width: 100%; height: auto; display: block; } svg text { fill: var(--soft); font-size: 12px; }
.grid { stroke: var(--grid); } .axis { stroke: var(--soft); }
.curve { fill: none; stroke-width: 2; stroke-linejoin: round;
  stroke-linecap: round; }
.curve.a { stroke: var(--a); } .curve.b { stroke: var(--b); stroke-dasharray: 5 3; }
.hover { fill: transparent; } .hover.a:hover { fill: var(--a); } .hover.b:hover { fill: var(--b); }
.bar { background: var(--a); height: 12px; }
.ready { fill: var(--ready); } .joining { fill: var(--joining); } .lost { fill: var(--lost); }
.suspected { fill: var(--suspected); } .left { fill: var(--left); }
.legend { font-size: 13px; color: var(--soft); }
.legend i { display: inline-block; width: 12px; height: 12px; border-radius: 3px;
  margin: 0 5px 0 12px; vertical-align: -1px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 4px 8px; border-bottom: 1px solid var(--grid); }
th:first-child, td:first-child { text-align: left; } th { color: var(--soft); font-weight: 500; }
.text { text-align: left; white-space: pre-wrap; } .wide { overflow-x: auto; }
"""


def page(history: History, name: str) -> str:
    """Return the HTML page about the run called ``name``."""
    begun = time.strftime("%Y-%m-%d %H:%M", time.localtime(history.begun_at))
    state = "" if history.ended else ", not ended when this page was written"
    parts = [
        f"<h1>{escape(name)}</h1>",
        f'<p class="soft">{escape(history.collector)}, begun {begun}{state}</p>',
        _tiles(history),
        f'<p class="bottleneck">{escape(history.bottleneck)}</p>' if history.bottleneck else "",
    ]
    for section in (_curves, _workers, _lags, _ledger, _env_faults):
        parts += section(history)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(name)}</title><style>{_STYLE}</style></head>"
        f"<body>\n{chr(10).join(parts)}\n</body></html>\n"
    )


def _tiles(history: History) -> str:
    lost = sum(sum(causes.values()) for causes in history.lost.values())
    rate = history.total_delivered / history.elapsed_s if history.elapsed_s else 0.0
    returns = [point[1] for point in _curve("episode_return", "a", history).at if point]
    tiles = {
        "frames delivered": short(history.total_delivered),
        "frames/s, on average": short(rate),
        "collecting": duration(history.elapsed_s),
        "workers": str(len(history.spans)),
        "episodes": short(history.episodes),
        "last return": short(returns[-1]) if returns else "-",
        "processes replaced": str(history.restarts),
        "frames lost": short(lost),
        "env faults": short(history.num_env_faults),
    }
    cells = (f'<div class="tile"><b>{v}</b><span>{name}</span></div>' for name, v in tiles.items())
    return f'<div class="tiles">{"".join(cells)}</div>'


def _curve(name: str, style: str, history: History, shown: str = "") -> Curve:
    """Return a figure over time; where it is not known, as without a batch, the curve goes on."""
    at: list[tuple[float, float] | None] = []
    for point in history.points:
        if point is None:
            at.append(None)
        elif not math.isnan(value := point.get(name, math.nan)):
            at.append((point["t_s"], value))
    return Curve(shown or name.replace("_", " "), style, at)


def _curves(history: History) -> list[str]:
    parts: list[str] = []
    for name, (figure, label) in sorted(history.curves.items(), key=_place):
        title = f"{label}: {figure.help}" if label else figure.help
        given = [_curve(name, "a", history, label)]
        chart = curves(title, given, history.end_s, from_zero=figure.unit != "any")
        parts += [f"<h2>{escape(title)}</h2>", chart]
    wanted = [figure for figure in FIGURES if figure.curve and not figure.label]
    if missing := [each.help for each in wanted if each.name not in history.curves]:
        parts.append(f'<p class="none">Not measured: {escape("; ".join(missing))}.</p>')
    both = [_curve("mean lag", "a", history), _curve("highest lag", "b", history)]
    legend = [("--a", "mean"), ("--b", "highest")]
    parts += ["<h2>Lag of the delivered frames, in versions</h2>", _legend(legend)]
    return [*parts, curves("Lag", both, history.end_s)]


def _place(curve: tuple[str, tuple[Figure, str]]) -> tuple[int, str]:
    """Sort curves as their figures are in the table, and then by label."""
    figure, label = curve[1]
    return FIGURES.index(figure), label


def _legend(entries: Sequence[tuple[str, str]]) -> str:
    shown = (f'<i style="background: var({color})"></i>{name}' for color, name in entries)
    return f'<p class="legend">{"".join(shown)}</p>'


def _table(heads: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of cells that are HTML."""
    head = "".join(f"<th>{cell}</th>" for cell in heads)
    body = (f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{head}</tr>{"".join(body)}</table></div>'


def _workers(history: History) -> list[str]:
    shown = sorted(history.spans)[:_MAX_LANES]
    rows = {
        f"worker {worker_id}": [
            (s.begin_s, s.end_s, s.state, f"{s.state}, from {duration(s.begin_s)}")
            for s in history.spans[worker_id]
        ]
        for worker_id in shown
    }
    note = ", ".join(f"{count:,} {what}" for what, count in sorted(history.changes.items()))
    note = note or "No worker joined or was lost on the way."
    if (more := len(history.spans) - len(shown)) > 0:
        note += f" {more:,} more workers are not shown."
    return [
        "<h2>Workers: joins and losses</h2>",
        f'<p class="soft">{note}</p>',
        _legend([(f"--{name}", name) for name in _STATES]),
        lanes("Workers over time", rows, history.end_s),
    ]


def _env_faults(history: History) -> list[str]:
    if not history.num_env_faults:
        return []
    shown = history.env_faults[-_MAX_FAULTS:]
    rows = [
        (
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(fault.time)),
            str(fault.worker_id),
            escape(fault.host),
            f'<div class="text">{escape(fault.message)}</div>',
        )
        for fault in shown
    ]
    more = history.num_env_faults - len(shown)
    note = f'<p class="soft">{more:,} earlier ones are not shown.</p>' if more > 0 else ""
    table = _table(("time", "worker", "host", "what it raised"), rows)
    return ["<h2>Envs that raised</h2>", note, table]


def _lags(history: History) -> list[str]:
    total = sum(history.lags.values()) or 1
    highest = max(history.lags, default=0)
    width = highest // _MAX_BARS + 1
    rows = []
    for low in range(0, highest + 1, width):
        name = str(low) if width == 1 else f"{low}-{low + width - 1}"
        count = sum(history.lags[lag] for lag in range(low, low + width))
        share = f"{count / total:.1%}"
        rows.append((name, f"{count:,}", share, f'<div class="bar" style="width: {share}"></div>'))
    table = _table(("lag in versions", "frames", "share", ""), rows)
    return ["<h2>How old the policy of delivered frames was</h2>", table]


def _ledger(history: History) -> list[str]:
    causes = sorted({cause for lost in history.lost.values() for cause, n in lost.items() if n})
    has_more = any(history.may_be_lost.values())  # on hosts that vanished
    heads = ["worker", "delivered", *(f"lost: {escape(cause)}" for cause in causes)]
    heads += ["at most more"] * has_more

    def row(name: str, workers: Collection[int]) -> list[str]:
        counts = [sum(history.delivered[w] for w in workers)]
        counts += [sum(history.lost[w][cause] for w in workers) for cause in causes]
        counts += [sum(history.may_be_lost[w] for w in workers)] * has_more
        return [name, *(f"{count:,}" for count in counts)]

    rows = [row(str(worker_id), [worker_id]) for worker_id in sorted(history.delivered)]
    rows.append(row("all", history.delivered))
    return ["<h2>Where the frames went</h2>", _table(heads, rows)]
