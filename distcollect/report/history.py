"""What happened in a run, read from its ``stats.jsonl``."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from distcollect.errors import ArgumentError
from distcollect.monitor import STATS_FILE

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
        restarts: processes that were replaced.
        episodes: that ended.
        elapsed_s: of all collectors together.
        verdict: the last one.
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
    restarts: int = 0
    episodes: int = 0
    elapsed_s: float = 0.0
    verdict: str = ""
    ended: bool = False

    @property
    def end_s(self) -> float:
        """When the last line was written."""
        last = next((p for p in reversed(self.points) if p is not None), None)
        return last.t_s if last else 0.0

    @property
    def total_delivered(self) -> int:
        return sum(self.delivered.values())


def stats_file(run: Path) -> Path:
    """The file of a run's folder; or ``run`` itself, if it is one.

    Raises:
        ArgumentError: there is none.
    """
    file = run / STATS_FILE if run.is_dir() else run
    if not file.is_file():
        raise ArgumentError(
            f"{run}: there is no {STATS_FILE}; name the folder that was the run's run_dir, as in "
            "Monitor(run_dir=...)"
        )
    return file


def read(file: Path) -> History:
    """The history in ``file``.

    Raises:
        ArgumentError: nothing in it is a snapshot of a collector.
    """
    try:
        with file.open("rb") as lines:
            num_lines = sum(1 for _ in lines)
        with file.open("rb") as lines:
            history = history_of(_snapshots(lines), per_point=-(-num_lines // MAX_POINTS))
    except OSError as error:
        raise ArgumentError(
            f"{file} can't be read ({error.strerror}): name a run's folder that you may read"
        ) from error
    if not history.points:
        raise ArgumentError(
            f"{file} holds no snapshots of a collector: if the run has only just begun, try again "
            f"in some seconds; else name a folder with a {STATS_FILE} of Monitor(run_dir=...)"
        )
    return history


def _snapshots(lines: Iterable[bytes]) -> Iterator[Mapping[str, Any]]:
    for line in lines:
        try:
            snapshot = json.loads(line)
        except ValueError:
            continue  # the last line of a run that was killed as it wrote it
        if isinstance(snapshot, Mapping) and "time" in snapshot and "frames_per_s" in snapshot:
            yield snapshot


def history_of(snapshots: Iterable[Mapping[str, Any]], *, per_point: int = 1) -> History:
    """The history that ``snapshots`` tell, in order; so many make a point."""
    history = History()
    last: Mapping[str, Any] | None = None
    waiting: list[Point] = []
    for snapshot in snapshots:
        elapsed_s = snapshot.get("elapsed_s", 0.0)
        if last is None:
            history.begun_at = snapshot["time"] - elapsed_s
        elif elapsed_s < last.get("elapsed_s", 0.0):
            # Another collector wrote on.
            _add_point(history, waiting)
            history.points.append(None)
            _settle(history, last)
            last = None
        t_s = snapshot["time"] - history.begun_at
        waiting.append(_point(t_s, snapshot, last))
        _note_workers(history, t_s, elapsed_s, snapshot, last)
        if len(waiting) >= per_point:
            _add_point(history, waiting)
        last = snapshot
    _add_point(history, waiting)
    if last is not None:
        _settle(history, last)
        history.collector = last.get("collector", "")
        history.verdict = str(last.get("verdict", ""))
        history.ended = bool(last.get("ended"))
    return history


def _point(t_s: float, snapshot: Mapping[str, Any], last: Mapping[str, Any] | None) -> Point:
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


def _lags(snapshot: Mapping[str, Any]) -> Counter[int]:
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
    history: History,
    t_s: float,
    elapsed_s: float,
    snapshot: Mapping[str, Any],
    last: Mapping[str, Any] | None,
) -> None:
    before = last.get("workers", {}) if last is not None else {}
    since = t_s - elapsed_s if last is None else last["time"] - history.begun_at
    for name, worker in snapshot.get("workers", {}).items():
        worker_id, state = int(name), worker.get("state", "ready")
        known = before.get(name, {})
        spans = history.spans[worker_id]
        if spans and spans[-1].state == state and spans[-1].end_s >= since:
            spans[-1] = spans[-1]._replace(end_s=t_s)
        else:
            spans.append(Span(since, t_s, state))
        if last is not None and not snapshot.get("ended"):
            history.events += [Event(t_s, worker_id, what) for what in _changes(known, worker)]


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


def _settle(history: History, last: Mapping[str, Any]) -> None:
    """Add the counts of a collector's last snapshot."""
    history.elapsed_s += last.get("elapsed_s", 0.0)
    history.lags.update(_lags(last))
    history.restarts += last.get("num_restarts", 0)
    history.episodes += last.get("episodes", {}).get("count", 0)
    for name, worker in last.get("workers", {}).items():
        history.delivered[int(name)] += worker.get("frames", 0)
        history.lost[int(name)].update(worker.get("lost", {}))
