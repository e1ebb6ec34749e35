"""Makes the pictures of the display, the report and a trace in distcollect/docs/images.

``python .ci/pictures.py`` trains for half a minute and draws what this run showed and wrote.
"""

from __future__ import annotations

import io
import json
import os
import re
import tempfile
import time
from collections import defaultdict
from html import escape, unescape
from pathlib import Path
from typing import Any

import gymnasium as gym
import matplotlib as mpl
import torch
from rich.console import Console
from torch import nn

import distcollect as dc
from distcollect.commands.report.history import read
from distcollect.commands.report.page import page
from distcollect.results import Stats
from distcollect.telemetry.display import rendered

mpl.use("Agg")

IMAGES = Path(__file__).parent.parent / "distcollect" / "docs" / "images"
TOTAL_FRAMES = 120_000
LOST_AT = 4_000  # the steps after which the process of worker 1 ends
TRACE_S = 0.6


class Env(gym.Wrapper[Any, Any, Any, Any]):
    """CartPole that says whether an episode reached 200 steps; one worker's process is lost."""

    def __init__(self, context: dc.EnvContext) -> None:
        super().__init__(gym.make("CartPole-v1"))
        self._ends = context.worker_id == 1 and context.incarnation == 0
        self._stepped = 0

    def reset(self, **kwargs: Any) -> Any:
        self._steps = 0
        return super().reset(**kwargs)[0], {"success": False}

    def step(self, action: Any) -> Any:
        time.sleep(0.0002)
        self._stepped += 1
        self._steps += 1
        if self._ends and self._stepped > LOST_AT:
            os._exit(1)
        *result, _ = super().step(action)
        return (*result, {"success": self._steps >= 200})


class Policy(nn.Module):
    """Chooses actions of CartPole."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))

    def forward(self, observation: torch.Tensor) -> torch.distributions.Categorical:
        return torch.distributions.Categorical(logits=self.net(observation))


def returns_to_go(reward: torch.Tensor, done: torch.Tensor) -> torch.Tensor:
    """The discounted sum of the rewards that follow each frame within the batch."""
    result, following = torch.zeros_like(reward), torch.zeros_like(reward[..., 0])
    for t in reversed(range(reward.shape[-1])):
        following = reward[..., t] + 0.99 * following * ~done[..., t]
        result[..., t] = following
    return result


def run(folder: Path) -> Stats:
    """Train, and return the newest statistics before the end."""
    shown: list[Stats] = []
    torch.manual_seed(0)
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=5e-3)
    collector = dc.MultiaSyncDataCollector(
        Env,
        policy,
        frames_per_batch=1_000,
        total_frames=TOTAL_FRAMES,
        num_workers=3,
        envs_per_worker=4,
        info_keys=["success"],
        monitor=dc.Monitor(
            view=False,
            run_dir=folder,
            trace=folder / "trace.json",
            callback=lambda stats: None if stats.ended else shown.append(stats),
            metrics={"success": ("next", "success")},
            every_s=0.5,
        ),
    )
    with collector:
        for batch in collector:
            after = batch["next"]
            value = returns_to_go(after["reward"].squeeze(-1), after["done"].squeeze(-1))
            advantage = (value - value.mean()) / (value.std() + 1e-6)
            chosen = policy(batch["observation"]).log_prob(batch["action"])
            loss = -(chosen * advantage).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            collector.update_policy_weights_(policy, wait=False)
    return shown[-2]


def draw_display(stats: Stats, file: Path) -> None:
    """What a terminal shows, as rich draws it."""
    console = Console(file=io.StringIO(), record=True, width=118, height=20, force_terminal=True)
    console.print(rendered(stats, 24))
    svg = console.export_svg(title="python train.py")
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)  # fonts of another server
    file.write_text(re.sub(r"\n\s*\n+", "\n", svg.replace("Fira Code, ", "")))


def draw_report(folder: Path, file: Path) -> None:
    """The curves and the workers of the report, one below the other."""
    html = page(read(folder / "stats.jsonl"), folder.name)
    style = html.partition("<style>")[2].partition("</style>")[0]
    light = dict(re.findall(r"(--\w+): (#\w+)", style.partition("@media")[0]))
    drawn = r"svg text|\.(?:grid|axis|curve|mark|a|b|ready|joining|suspected|lost|left)\b"
    rules = "".join(re.findall(rf"(?:{drawn})[^{{}}]*\{{[^}}]*\}}", style))
    for name, color in light.items():
        rules = rules.replace(f"var({name})", color)
    parts, y = [], 100
    tiles = re.findall(r'<div class="tile"><b>(.*?)</b><span>(.*?)</span>', html)[:6]
    for index, (value, name) in enumerate(tiles):
        x = 20 + 125 * index
        parts.append(
            f'<rect x="{x}" y="14" width="117" height="50" rx="8" fill="{light["--card"]}"/>'
            f'<text x="{x + 10}" y="36" style="font-size: 18px; fill: {light["--text"]}">'
            f"{value}</text>"
            f'<text x="{x + 10}" y="54" style="font-size: 11px">{name}</text>'
        )
    for title, height, chart in re.findall(
        r'<h2>([^<]*)</h2>(?:(?!<h2>).)*?<svg viewBox="0 0 760 (\d+)"[^>]*>(.*?)</svg>',
        html,
        re.DOTALL,
    ):
        if "policy of delivered" in title:
            continue
        # Without tooltips, and the invisible dots that have most of them.
        drawing = re.sub(r'<circle class="hover.*?</circle>|<title>.*?</title>', "", chart)
        parts.append(
            f'<text x="20" y="{y}" style="font-size: 15px; fill: {light["--text"]}">'
            f"{escape(unescape(title))}</text>"
            f'<g transform="translate(20 {y + 6})">{drawing}</g>'
        )
        y += int(height) + 36
    file.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 {y}" '
        'font-family="system-ui, sans-serif"><style>'
        f'{rules}</style><rect width="800" height="{y}" fill="{light["--paper"]}"/>'
        f"{''.join(parts)}</svg>\n"
    )


def draw_trace(trace: Path, file: Path) -> None:
    """A part of the trace: a row for each thread, as Perfetto shows it."""
    from matplotlib import pyplot as plt  # noqa: PLC0415 - after the backend was chosen

    events = json.loads(trace.read_text())
    events = events["traceEvents"] if isinstance(events, dict) else events
    names: dict[tuple[str, int, int], str] = {}
    spans: dict[tuple[int, int], list[tuple[float, float, str]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "M" and event["name"] in ("process_name", "thread_name"):
            tid = event["tid"] if event["name"] == "thread_name" else 0
            names[event["name"], event["pid"], tid] = event["args"]["name"]
        elif event["ph"] == "X":
            row = spans[event["pid"], event["tid"]]
            row.append((event["ts"] / 1e6, event["dur"] / 1e6, event["name"]))
    begin = sorted(at for row in spans.values() for at, _, name in row if name == "train")[2] - 0.05
    rows = [
        (pid, tid, seen)
        for (pid, tid), row in sorted(spans.items())
        if (seen := [s for s in row if s[0] < begin + TRACE_S and s[0] + s[1] > begin])
    ]
    kinds = sorted({re.sub(r" \d+$", "", name) for *_, seen in rows for *_, name in seen})
    color = dict(zip(kinds, plt.get_cmap("tab20").colors, strict=False)) | {"rollout": "0.85"}
    figure, axes = plt.subplots(figsize=(9, 0.5 * len(rows) + 1.4), dpi=110)
    for index, (_, _, seen) in enumerate(rows):
        # Spans within others are drawn over them, and lower.
        for at, took, name in sorted(seen, key=lambda span: -span[1]):
            outer = sum(o[0] <= at and o[0] + o[1] >= at + took for o in seen) - 1
            height = 0.8 * 0.75 ** max(0, outer)
            bar = [((at - begin) * 1e3, took * 1e3)]
            kind = re.sub(r" \d+$", "", name)
            axes.broken_barh(bar, (index - 0.4, height), color=color[kind], label=kind)
    labels = [
        f"{names.get(('process_name', pid, 0), pid)}: {names.get(('thread_name', pid, tid), tid)}"
        for pid, tid, _ in rows
    ]
    axes.set_yticks(range(len(rows)), labels)
    axes.invert_yaxis()
    axes.set_xlim(0, TRACE_S * 1e3)
    axes.set_xlabel("milliseconds")
    handles, texts = axes.get_legend_handles_labels()
    of_text = dict(zip(texts, handles, strict=True))
    figure.legend(of_text.values(), of_text, loc="upper center", ncols=7, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.9))
    figure.savefig(file)


def main() -> None:
    """Make all pictures."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "cartpole"
        stats = run(folder)
        draw_display(stats, IMAGES / "display.svg")
        draw_report(folder, IMAGES / "report.svg")
        draw_trace(folder / "trace.json", IMAGES / "trace.png")


if __name__ == "__main__":
    main()
