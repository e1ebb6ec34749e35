"""The history of a run, read from its ``stats.jsonl``."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from distcollect.errors import ArgumentError
from distcollect.results import EnvFault, Lags, Stats, WorkerStats
from distcollect.telemetry.figures import FIGURES, Figure
from distcollect.telemetry.stats_file import STATS_FILE, Snapshot, opened, snapshots

# A curve of the page's width can't show more.
MAX_POINTS = 400


class Span(NamedTuple):
    """A worker was in a state from ``begin_s`` to ``end_s``, as far as snapshots show.

    A worker that was lost and is not seen so, as it was replaced between two snapshots, has a span
    "lost" without a length.
    """

    begin_s: float
    end_s: float
    state: str


@dataclass
class History:
    """The history of a run, or of several that wrote to one file.

    Attributes:
        begun_at: when it began, in seconds since 1970.
        collector: name of the last collector's class.
        points: by time, the names and values of what is plotted (NaN: not measured), with the time
            "t_s" in seconds since the run began; None in place of a point separates two collectors.
        curves: what was measured, besides lags: by name, the figure and its label's value.
        spans: maps a worker_id to its states.
        changes: how often a worker "joined" on the way, was "lost", or "left".
        lags: maps a lag to the number of delivered frames.
        delivered: maps a worker_id to its delivered frames.
        lost: maps a worker_id to its lost frames by cause.
        may_be_lost: maps a worker_id to frames that may be lost besides these.
        restarts: number of processes that were replaced.
        num_env_faults: number of times that an env raised.
        env_faults: what the snapshots tell of these, by time.
        episodes: number of episodes that ended.
        elapsed_s: collecting time of all collectors together.
        bottleneck: what the last collector was bound by, in words.
        ended: whether the last collector was shut down.
    """

    begun_at: float = 0.0
    collector: str = ""
    points: list[Mapping[str, float] | None] = field(default_factory=list)
    curves: dict[str, tuple[Figure, str]] = field(default_factory=dict)
    spans: dict[int, list[Span]] = field(default_factory=lambda: defaultdict(list))
    changes: Counter[str] = field(default_factory=Counter)
    lags: Counter[int] = field(default_factory=Counter)
    delivered: Counter[int] = field(default_factory=Counter)
    lost: dict[int, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    may_be_lost: Counter[int] = field(default_factory=Counter)
    restarts: int = 0
    num_env_faults: int = 0
    env_faults: list[EnvFault] = field(default_factory=list)
    episodes: int = 0
    elapsed_s: float = 0.0
    bottleneck: str = ""
    ended: bool = False

    @property
    def end_s(self) -> float:
        """Time of the last snapshot, in seconds since the run began."""
        return max((point["t_s"] for point in self.points if point), default=0.0)

    @property
    def total_delivered(self) -> int:
        return sum(self.delivered.values())


def read(file: Path) -> History:
    """Return the history in ``file``.

    Raises:
        ArgumentError: the file can't be read, or holds no snapshot of a collector.
    """
    with opened(file) as lines:
        num_lines = sum(1 for _ in lines)
        lines.seek(0)
        history = history_of(snapshots(lines), per_point=-(-num_lines // MAX_POINTS))
    if not history.points:
        raise ArgumentError(
            f"{file} holds no snapshots of a collector: if the run has only just begun, try again "
            f"in some seconds; otherwise name a folder with a {STATS_FILE} of Monitor(run_dir=...)"
        )
    return history


def history_of(given: Iterable[Snapshot], *, per_point: int = 1) -> History:
    """Return the history from snapshots in order of time.

    One of ``per_point`` of them makes a point, and so does the last one of each collector.
    """
    history = History()
    faults: set[EnvFault] = set()
    last: Stats | None = None
    plotted: Stats | None = None  # the last one of this collector that made a point
    writer, begun_s, t_s = None, 0.0, 0.0  # of a collector: its id, begin, and last snapshot's time
    for number, snapshot in enumerate(given, start=1):
        stats, at, of = Stats.from_dict(snapshot), snapshot["time"], snapshot.get("collector_id")
        if last is None:
            history.begun_at = at - stats.elapsed_s
        elif of != writer or stats.elapsed_s < last.elapsed_s:
            _settle(history, t_s, last, plotted)
            history.points.append(None)
            last = plotted = None
            begun_s = max(t_s, at - stats.elapsed_s - history.begun_at)
        since_s = begun_s if last is None else t_s
        # By elapsed_s, which only rises: a host's clock may be set back.
        t_s = begun_s + stats.elapsed_s
        _note_workers(history, since_s, t_s, stats, last)
        faults.update(stats.env_faults)
        if number % per_point == 0:
            _add_point(history, t_s, stats, plotted)
            plotted = stats
        last, writer = stats, of
        history.bottleneck = snapshot.get("bottleneck", "")
    history.env_faults = sorted(faults, key=lambda fault: fault.time)
    if last is not None:
        _settle(history, t_s, last, plotted)
        history.collector, history.ended = last.collector, last.ended
    return history


def _add_point(history: History, t_s: float, stats: Stats, last: Stats | None) -> None:
    lags = Lags(Counter(stats.lag.frames) - Counter(last.lag.frames if last is not None else ()))
    point = {"t_s": t_s}
    for figure in FIGURES:
        for label, value in figure.values(stats).items() if figure.curve else ():
            name = f"{figure.name} {label}".strip()
            point[name] = value
            history.curves[name] = figure, label
    point["mean lag"] = lags.mean if lags.frames else math.nan
    point["highest lag"] = lags.max if lags.frames else math.nan
    history.points.append(point)


def _note_workers(
    history: History, since_s: float, t_s: float, stats: Stats, last: Stats | None
) -> None:
    """Note the states of workers, and what has changed since the last snapshot."""
    for worker_id, worker in stats.workers.items():
        spans, state = history.spans[worker_id], worker.state
        if last is not None:
            known = last.workers.get(worker_id, WorkerStats(state="joining"))
            # At the end of a collector all workers leave, which is no change.
            state = known.state if stats.ended else state
            was_there = known.state in ("ready", "suspected")
            # A worker may be lost and replaced between two snapshots.
            replaced = worker.num_restarts > known.num_restarts
            if state == "left" != known.state:
                history.changes["left"] += 1
            elif was_there and (state in ("lost", "joining") or replaced):
                history.changes["lost"] += 1
                was_there = False
                if state != "lost":
                    spans.append(Span(since_s, since_s, "lost"))
            if state == "ready" and not was_there:
                history.changes["joined"] += 1
        if spans and spans[-1].state == state and spans[-1].end_s >= since_s:
            spans[-1] = spans[-1]._replace(end_s=t_s)
        else:
            spans.append(Span(since_s, t_s, state))


def _settle(history: History, t_s: float, last: Stats, plotted: Stats | None) -> None:
    """Add the counts of a collector's last snapshot, and a point unless it has made one."""
    if plotted is not last:
        _add_point(history, t_s, last, plotted)
    history.elapsed_s += last.elapsed_s
    history.lags.update(last.lag.frames)
    history.restarts += last.num_restarts
    history.num_env_faults += last.num_env_faults
    history.episodes += last.episodes.count
    for worker_id, worker in last.workers.items():
        history.delivered[worker_id] += worker.frames
        history.lost[worker_id].update(worker.lost)
        history.may_be_lost[worker_id] += worker.may_be_lost
