"""The history of a run, read from its ``stats.jsonl``."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from distcollect.errors import ArgumentError
from distcollect.results import EnvFault, Lags, Stats
from distcollect.telemetry.stats_file import STATS_FILE, Snapshot, opened, snapshots

# What follows the name of a metric: so no figure has the name of another.
OF_EPISODES = " of episodes"
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
        points: by time, the names and values of figures (None: not measured), with the time "t_s"
            in seconds since the run began; None in place of a point separates two collectors.
        metrics: the figures that are metrics of episodes.
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
    points: list[Mapping[str, float | None] | None] = field(default_factory=list)
    metrics: set[str] = field(default_factory=set)
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
        return max((point["t_s"] or 0.0 for point in self.points if point), default=0.0)

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
    last: Snapshot | None = None
    plotted: Snapshot | None = None  # the last one of this collector that made a point
    faults: set[EnvFault] = set()
    begun_s = t_s = 0.0  # begin of a collector, and time of its last snapshot
    for number, snapshot in enumerate(given, start=1):
        elapsed_s = snapshot.get("elapsed_s", 0.0)
        if last is None:
            history.begun_at = snapshot["time"] - elapsed_s
        elif _is_of_another(snapshot, last):
            _settle(history, t_s, last, plotted)
            history.points.append(None)
            last = plotted = None
            begun_s = max(t_s, snapshot["time"] - elapsed_s - history.begun_at)
        since_s = begun_s if last is None else t_s
        # By elapsed_s, which only rises: a host's clock may be set back.
        t_s = begun_s + elapsed_s
        _note_workers(history, since_s, t_s, snapshot, last)
        faults.update(Stats.from_dict({"env_faults": snapshot.get("env_faults", ())}).env_faults)
        last = snapshot
        if number % per_point == 0:
            _add_point(history, t_s, snapshot, plotted)
            plotted = snapshot
    history.env_faults = sorted(faults, key=lambda fault: fault.time)
    if last is not None:
        _settle(history, t_s, last, plotted)
        history.collector = last.get("collector", "")
        history.bottleneck = str(last.get("bottleneck", ""))
        history.ended = bool(last.get("ended"))
    return history


def _is_of_another(snapshot: Snapshot, last: Snapshot) -> bool:
    """Return True if another collector wrote this snapshot."""
    ids = snapshot.get("collector_id"), last.get("collector_id")
    return ids[0] != ids[1] or snapshot.get("elapsed_s", 0.0) < last.get("elapsed_s", 0.0)


def _add_point(history: History, t_s: float, snapshot: Snapshot, last: Snapshot | None) -> None:
    lags = Lags(_lags(snapshot) - (_lags(last) if last is not None else Counter()))
    episodes = snapshot.get("episodes", {})
    metrics = {f"{name}{OF_EPISODES}": mean for name, mean in episodes.get("metrics", {}).items()}
    history.metrics.update(metrics)
    history.points.append(
        {
            **metrics,
            "t_s": t_s,
            "frames per second": snapshot["frames_per_s"],
            "episode return": episodes.get("mean_return"),
            "episode length": episodes.get("mean_length"),
            "mean lag": lags.mean if lags.frames else None,
            "highest lag": lags.max if lags.frames else None,
        }
    )


def _lags(snapshot: Snapshot) -> Counter[int]:
    return Counter({int(lag): n for lag, n in snapshot.get("lag", {}).get("frames", {}).items()})


def _note_workers(
    history: History, since_s: float, t_s: float, snapshot: Snapshot, last: Snapshot | None
) -> None:
    before = last.get("workers", {}) if last is not None else {}
    for name, worker in snapshot.get("workers", {}).items():
        spans, known = history.spans[int(name)], before.get(name, {})
        state = worker.get("state", "ready")
        if last is not None:
            # At the end of a collector all workers leave, which is no change.
            state = known.get("state", "joining") if snapshot.get("ended") else state
            for change in _changes(known, {**worker, "state": state}):
                history.changes[change] += 1
                if change == "lost" != state:
                    spans.append(Span(since_s, since_s, "lost"))
        if spans and spans[-1].state == state and spans[-1].end_s >= since_s:
            spans[-1] = spans[-1]._replace(end_s=t_s)
        else:
            spans.append(Span(since_s, t_s, state))


def _changes(known: Mapping[str, Any], worker: Mapping[str, Any]) -> Iterator[str]:
    was, state = known.get("state", "joining"), worker.get("state", "ready")
    was_there = was in ("ready", "suspected")
    replaced = worker.get("num_restarts", 0) > known.get("num_restarts", 0)
    if state == "left" != was:
        yield "left"
    # A worker may be lost and replaced between two snapshots.
    elif was_there and (state in ("lost", "joining") or replaced):
        yield "lost"
        was_there = False
    if state == "ready" and not was_there:
        yield "joined"


def _settle(history: History, t_s: float, last: Snapshot, plotted: Snapshot | None) -> None:
    """Add the counts of a collector's last snapshot, and a point unless it has made one."""
    if plotted is not last:
        _add_point(history, t_s, last, plotted)
    history.elapsed_s += last.get("elapsed_s", 0.0)
    history.lags.update(_lags(last))
    history.restarts += last.get("num_restarts", 0)
    history.num_env_faults += last.get("num_env_faults", 0)
    history.episodes += last.get("episodes", {}).get("count", 0)
    for name, worker in last.get("workers", {}).items():
        history.delivered[int(name)] += worker.get("frames", 0)
        history.lost[int(name)].update(worker.get("lost", {}))
        history.may_be_lost[int(name)] += worker.get("may_be_lost", 0)
