"""What happened in a run, read from its ``stats.jsonl``."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from distcollect.errors import ArgumentError
from distcollect.telemetry.stats_file import STATS_FILE, Snapshot, opened, snapshots

# As many points as a curve of this width can show.
MAX_POINTS = 400


class Point(NamedTuple):
    """Figures at a moment, None where there was nothing to measure.

    Attributes:
        t_s: seconds since the run began.
        frames_per_s: lately.
        episode_return: on average over the last hundred episodes.
        episode_length: likewise, in frames.
        lag_mean: of the frames that were delivered since the last point.
        lag_max: of these.
    """

    t_s: float
    frames_per_s: float | None
    episode_return: float | None
    episode_length: float | None
    lag_mean: float | None
    lag_max: float | None


class Span(NamedTuple):
    """A worker was in a state from ``begin_s`` to ``end_s``, as far as was seen."""

    begin_s: float
    end_s: float
    state: str


class Event(NamedTuple):
    """At ``t_s`` it was seen that a worker "joined", was "lost", or "left"."""

    t_s: float
    worker_id: int
    what: str


@dataclass
class History:
    """A run, or several that went to one file.

    Attributes:
        begun_at: seconds since 1970.
        collector: name of the class.
        points: by time; a point of None alone separates two collectors.
        spans: worker_id to what it was in.
        events: by time.
        lags: lag to delivered frames.
        delivered: worker_id to frames.
        lost: worker_id to cause to frames.
        may_be_lost: worker_id to frames that may be lost beyond these.
        restarts: processes that were replaced.
        episodes: that ended.
        elapsed_s: of all collectors together.
        bottleneck: what it was bound by at last, in words.
        ended: whether the last collector was shut down.
    """

    begun_at: float = 0.0
    collector: str = ""
    points: list[Point | None] = field(default_factory=list)
    spans: dict[int, list[Span]] = field(default_factory=lambda: defaultdict(list))
    events: list[Event] = field(default_factory=list)
    lags: Counter[int] = field(default_factory=Counter)
    delivered: Counter[int] = field(default_factory=Counter)
    lost: dict[int, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    may_be_lost: Counter[int] = field(default_factory=Counter)
    restarts: int = 0
    episodes: int = 0
    elapsed_s: float = 0.0
    bottleneck: str = ""
    ended: bool = False

    @property
    def end_s(self) -> float:
        """When the last line was written."""
        last = next((p for p in reversed(self.points) if p is not None), None)
        return last.t_s if last else 0.0

    @property
    def total_delivered(self) -> int:
        return sum(self.delivered.values())


def read(file: Path) -> History:
    """The history in ``file``.

    Raises:
        ArgumentError: it can't be read, or nothing in it is a snapshot of a collector.
    """
    with opened(file) as lines:
        num_lines = sum(1 for _ in lines)
        lines.seek(0)
        history = history_of(snapshots(lines), per_point=-(-num_lines // MAX_POINTS))
    if not history.points:
        raise ArgumentError(
            f"{file} holds no snapshots of a collector: if the run has only just begun, try again "
            f"in some seconds; else name a folder with a {STATS_FILE} of Monitor(run_dir=...)"
        )
    return history


def history_of(told: Iterable[Snapshot], *, per_point: int = 1) -> History:
    """The history that snapshots tell, in order; so many make a point."""
    history = History()
    last: Snapshot | None = None
    begun_s = t_s = 0.0  # of a collector, and of its last snapshot
    waiting: list[Point] = []
    for snapshot in told:
        elapsed_s = snapshot.get("elapsed_s", 0.0)
        if last is None:
            history.begun_at = snapshot["time"] - elapsed_s
        elif _is_of_another(snapshot, last):
            _add_point(history, waiting)
            history.points.append(None)
            _settle(history, last)
            last = None
            begun_s = max(t_s, snapshot["time"] - elapsed_s - history.begun_at)
        since_s = begun_s if last is None else t_s
        # Hosts' clocks are set now and then; elapsed_s only rises.
        t_s = begun_s + elapsed_s
        waiting.append(_point(t_s, snapshot, last))
        _note_workers(history, since_s, t_s, snapshot, last)
        if len(waiting) >= per_point:
            _add_point(history, waiting)
        last = snapshot
    _add_point(history, waiting)
    if last is not None:
        _settle(history, last)
        history.collector = last.get("collector", "")
        history.bottleneck = str(last.get("bottleneck", ""))
        history.ended = bool(last.get("ended"))
    return history


def _is_of_another(snapshot: Snapshot, last: Snapshot) -> bool:
    """Another collector wrote on."""
    ids = snapshot.get("collector_id"), last.get("collector_id")
    return ids[0] != ids[1] or snapshot.get("elapsed_s", 0.0) < last.get("elapsed_s", 0.0)


def _point(t_s: float, snapshot: Snapshot, last: Snapshot | None) -> Point:
    before = _lags(last) if last is not None else Counter[int]()
    new = {lag: count - before[lag] for lag, count in _lags(snapshot).items()}
    new = {lag: count for lag, count in new.items() if count > 0}
    episodes = snapshot.get("episodes", {})
    return Point(
        t_s,
        snapshot["frames_per_s"],
        episodes.get("mean_return"),
        episodes.get("mean_length"),
        sum(lag * count for lag, count in new.items()) / sum(new.values()) if new else None,
        max(new) if new else None,
    )


def _lags(snapshot: Snapshot) -> Counter[int]:
    return Counter({int(lag): n for lag, n in snapshot.get("lag", {}).get("frames", {}).items()})


def _add_point(history: History, waiting: list[Point]) -> None:
    """Make one point of those in ``waiting``."""
    if not waiting:
        return
    columns = list(zip(*waiting, strict=True))
    rate, episode_return, episode_length, lag = map(_mean, columns[1:-1])
    highest = max((each for each in columns[-1] if each is not None), default=None)
    t_s = waiting[-1].t_s
    history.points.append(Point(t_s, rate, episode_return, episode_length, lag, highest))
    waiting.clear()


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _note_workers(
    history: History, since_s: float, t_s: float, snapshot: Snapshot, last: Snapshot | None
) -> None:
    before = last.get("workers", {}) if last is not None else {}
    for name, worker in snapshot.get("workers", {}).items():
        worker_id, state = int(name), worker.get("state", "ready")
        known = before.get(name, {})
        spans = history.spans[worker_id]
        if spans and spans[-1].state == state and spans[-1].end_s >= since_s:
            spans[-1] = spans[-1]._replace(end_s=t_s)
        else:
            spans.append(Span(since_s, t_s, state))
        if last is not None:
            # That all of them leave with their collector is no news.
            was = known.get("state", "joining")
            now = {**worker, "state": was} if snapshot.get("ended") else worker
            history.events += [Event(t_s, worker_id, what) for what in _changes(known, now)]


def _changes(known: Mapping[str, Any], worker: Mapping[str, Any]) -> Iterator[str]:
    was, state = known.get("state", "joining"), worker.get("state", "ready")
    was_there = was in ("ready", "suspected")
    replaced = worker.get("num_restarts", 0) > known.get("num_restarts", 0)
    if state == "left" != was:
        yield "left"
    # A short loss lies between two snapshots.
    elif was_there and (state in ("lost", "joining") or replaced):
        yield "lost"
        was_there = False
    if state == "ready" and not was_there:
        yield "joined"


def _settle(history: History, last: Snapshot) -> None:
    """Add the counts of a collector's last snapshot."""
    history.elapsed_s += last.get("elapsed_s", 0.0)
    history.lags.update(_lags(last))
    history.restarts += last.get("num_restarts", 0)
    history.episodes += last.get("episodes", {}).get("count", 0)
    for name, worker in last.get("workers", {}).items():
        history.delivered[int(name)] += worker.get("frames", 0)
        history.lost[int(name)].update(worker.get("lost", {}))
        history.may_be_lost[int(name)] += worker.get("may_be_lost", 0)
