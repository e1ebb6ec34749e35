"""The trainer's statistics: what workers delivered, and how time was spent."""

from __future__ import annotations

import contextlib
import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from distcollect.common.clock import clock_ns
from distcollect.errors import EnvError
from distcollect.results import (
    EnvFault,
    EpisodeStats,
    Frames,
    Lags,
    LedgerReport,
    Stats,
    TrainerTimes,
    WorkerStats,
    WorkerTimes,
)
from distcollect.rollout.header import NO_WORK, Header, WorkReport
from distcollect.telemetry.trace import PushTimes, Trace

Activity = Literal["train", "collect", "weights", "transfer", "assemble"]

_Recent: TypeAlias = deque[float]  # of the last episodes

_NO_FRAMES = Frames()
_NUM_TIMES = 6  # the first fields of a WorkReport
_RECENT_EPISODES = 100
_RECENT_FAULTS = 20
# The recent rate is the rate since the oldest mark in this period.
_RECENT_NS = 10_000_000_000
_MARK_EVERY_NS = 500_000_000


@dataclass(slots=True)
class _Tally:
    """Counters of one worker.

    Attributes:
        incarnation: number of its present process.
        work: work of the present process, up to its last rollout.
        before: work of its earlier processes.
        lags: maps a policy lag, in versions, to the number of delivered frames that have it.
        num_bytes: size of its rollouts that were fetched.
        transfer_ns: time in which its rollouts were being fetched.
        num_restarts: how often its process was replaced.
        num_env_faults: how often an env raised in the present process.
        faults_before: the same in its earlier processes.
        num_episodes: episodes that ended.
        metrics: for each metric, its values in the last episodes.
    """

    incarnation: int
    metrics: dict[str, _Recent]
    work: WorkReport = NO_WORK
    before: WorkReport = NO_WORK
    lags: Counter[int] = field(default_factory=Counter)
    num_bytes: int = 0
    transfer_ns: int = 0
    num_restarts: int = 0
    num_env_faults: int = 0
    faults_before: int = 0
    num_episodes: int = 0

    def replaced(self, incarnation: int) -> None:
        """Count for another process from now on."""
        self.before, self.work = _sum((self.before, self.work)), NO_WORK
        self.num_restarts += 1
        self.faults_before += self.num_env_faults
        self.num_env_faults = 0
        self.incarnation = incarnation

    def add(self, other: _Tally) -> None:
        """Add the counters of another worker."""
        self.before = _sum((self.before, other.before, other.work))
        self.lags.update(other.lags)
        self.num_bytes += other.num_bytes
        self.transfer_ns += other.transfer_ns
        self.num_restarts += other.num_restarts
        self.faults_before += other.faults_before + other.num_env_faults
        self.num_episodes += other.num_episodes


class _Mark(NamedTuple):
    """Frames delivered up to the time ``at``, by worker_id."""

    at: int
    frames: Mapping[int, int]


class StatsRecorder:
    """Records what a collector does; every method may be called from any thread."""

    def __init__(
        self,
        clock: Callable[[], int] = clock_ns,
        *,
        trace: Trace | None = None,
        metrics: Sequence[str] = (),
    ) -> None:
        """Record for one collector.

        Args:
            clock: counts nanoseconds.
            trace: gets everything that takes time.
            metrics: names of the metrics of episodes.
        """
        self._clock = clock
        self._trace = trace
        self._metrics = {name: _recent() for name in metrics}
        # Reentrant: garbage collection while it is held may close a collector.
        self._lock = threading.RLock()
        self._tallies: dict[int, _Tally] = {}
        self._begun_at: int | None = None
        self._ended_at: int | None = None
        self._activity: Activity = "train"
        self._since = 0
        self._spent: Counter[str] = Counter()
        self._marks: deque[_Mark] = deque()
        self._recent: deque[tuple[float, int]] = deque(maxlen=_RECENT_EPISODES)
        self._faults: deque[EnvFault] = deque(maxlen=_RECENT_FAULTS)
        self._num_asked = 0
        self._ready_when_asked = 0

    # What the thread that takes batches does.

    def batch_requested(self, num_ready: int) -> None:
        """A batch is requested while ``num_ready`` rollouts are ready."""
        with self._lock:
            self._num_asked += 1
            self._ready_when_asked += num_ready

    def switch_to(self, activity: Activity) -> None:
        """The thread does this from now on."""
        with self._lock:
            self._switch(activity)

    @contextlib.contextmanager
    def publishing(self) -> Iterator[None]:
        """The calling thread sends weights in this context; it may be any thread."""
        with self._lock:
            interrupted = self._activity if self._activity != "collect" else None
            if interrupted is not None and self._begun_at is not None:
                self._switch("weights")
        try:
            yield
        finally:
            with self._lock:
                if interrupted is not None and self._activity == "weights":
                    self._switch(interrupted)

    def end(self) -> None:
        """No more batches are requested. A second call does nothing."""
        with self._lock:
            if self._ended_at is None:
                self._switch("train")
                self._ended_at = self._since

    def _switch(self, activity: Activity) -> None:
        if self._ended_at is not None:
            return
        now = self._clock()
        if self._begun_at is None:
            self._begun_at = now
            self._marks.append(_Mark(now, {}))
        else:
            self._spent[self._activity] += now - self._since
            if self._trace is not None:
                self._trace.activity(self._activity, self._since, now)
        self._activity, self._since = activity, now

    # What comes from workers.

    def joined(self, worker_id: int, incarnation: int) -> None:
        """A process has joined a worker's slot."""
        with self._lock:
            tally = self._tally(worker_id, incarnation)
            if incarnation != tally.incarnation:
                tally.replaced(incarnation)

    def collected(self, header: Header, asked_at: int | None = None) -> None:
        """A rollout is ready; ``asked_at``: when it was requested; None: it was collected here."""
        if self._trace is not None:
            process = None if asked_at is None else (header.worker_id, header.incarnation)
            self._trace.rollout(process, header.spans, asked_at or 0, self._clock())
        work = header.work
        with self._lock:
            tally = self._tally(header.worker_id, header.incarnation)
            if tally.incarnation != header.incarnation:
                return  # from a process that was replaced
            tally.work = work
            tally.num_env_faults = header.env_faults
            self._faults.extend(header.faults)
            tally.num_episodes += len(work.returns)
            self._recent.extend(zip(work.returns, work.lengths, strict=True))
            metrics = work.metrics or {}
            for name in self._metrics:
                values = metrics.get(name, ())
                self._metrics[name].extend(values)
                tally.metrics[name].extend(values)

    def env_failed(self, worker_id: int, incarnation: int, error: EnvError) -> None:
        """An env of a worker raised too often; no header tells of its last faults."""
        with self._lock:
            tally = self._tally(worker_id, incarnation)
            if tally.incarnation == incarnation:
                tally.num_env_faults = error.num_env_faults
                self._faults.extend(error.env_faults)

    def pushed(self, push: PushTimes) -> None:
        """Weights were sent."""
        if self._trace is not None:
            self._trace.pushed(push)

    def fetched(self, worker_id: int, num_bytes: int, took_ns: int) -> None:
        """A rollout was fetched."""
        with self._lock:
            tally = self._tally(worker_id)
            tally.num_bytes += num_bytes
            tally.transfer_ns += took_ns
        if self._trace is not None:
            now = self._clock()
            self._trace.fetched(worker_id, now - took_ns, now)

    def delivered(
        self, batch: Iterable[tuple[int, Sequence[tuple[int, int]]]], at: int | None = None
    ) -> None:
        """A batch was delivered.

        Args:
            batch: of each rollout the worker_id and pairs (lag, frames).
            at: when it was, in nanoseconds of the clock; None: now.
        """
        with self._lock:
            for worker_id, lags in batch:
                counts = self._tally(worker_id).lags
                for lag, count in lags:
                    counts[lag] += count
            now = self._clock() if at is None else at
            if now - self._marks[-1].at >= _MARK_EVERY_NS:
                self._marks.append(self._mark(now))
                while len(self._marks) > 2 and self._marks[1].at <= now - _RECENT_NS:
                    self._marks.popleft()

    def _tally(self, worker_id: int, incarnation: int = 0) -> _Tally:
        tally = self._tallies.get(worker_id)
        if tally is None:
            tally = self._tallies[worker_id] = self._new_tally(incarnation)
        return tally

    def _new_tally(self, incarnation: int = 0) -> _Tally:
        return _Tally(incarnation, {name: _recent() for name in self._metrics})

    def _mark(self, now: int) -> _Mark:
        return _Mark(now, {w: tally.lags.total() for w, tally in self._tallies.items()})

    def snapshot(
        self,
        about: Stats,
        *,
        states: Mapping[int, str],
        ready: Mapping[int, int],
        ledger: LedgerReport | None,
    ) -> Stats:
        """Make a snapshot.

        Args:
            about: the values that are not recorded here.
            states: maps the worker_id of each present worker to its state.
            ready: maps a worker_id to its number of ready rollouts.
            ledger: what became of all frames; None: there is no ledger.
        """
        with self._lock:
            now = self._clock() if self._ended_at is None else self._ended_at
            spent = self._spent.copy()
            if self._begun_at is not None:
                spent[self._activity] += now - self._since
            elapsed_s = (now - (now if self._begun_at is None else self._begun_at)) / 1e9
            missing = {w: self._new_tally() for w in states if w not in self._tallies}
            tallies = dict(sorted({**self._tallies, **missing}.items()))
            fates = ledger.workers if ledger else {}
            rates = self._rates(now)
            workers = {
                worker_id: WorkerStats(
                    state=states.get(worker_id, "lost"),
                    frames=tally.lags.total(),
                    num_ready=ready.get(worker_id, 0),
                    num_episodes=tally.num_episodes,
                    metrics=_means(tally.metrics),
                    **_figures(
                        tally,
                        fates.get(worker_id, _NO_FRAMES),
                        rates.get(worker_id, 0.0),
                        elapsed_s,
                    ),
                )
                for worker_id, tally in tallies.items()
            }
            every = self._new_tally()
            for tally in tallies.values():
                every.add(tally)
            return replace(
                about,
                elapsed_s=elapsed_s,
                delivered=every.lags.total(),
                episodes=_episodes(every.num_episodes, self._recent, _means(self._metrics)),
                trainer=_shares(spent),
                num_ready=sum(ready.values()),
                mean_ready=self._ready_when_asked / max(1, self._num_asked),
                env_faults=tuple(self._faults),
                workers=workers,
                **_figures(
                    every, ledger.total if ledger else _NO_FRAMES, sum(rates.values()), elapsed_s
                ),
            )

    def _rates(self, now: int) -> dict[int, float]:
        """The recent frames/s by worker_id."""
        if not self._marks:
            return {}
        first = self._marks[0]
        last = self._marks[-1] if len(self._marks) > 1 else self._mark(now)
        # The rate is taken between two batches: up to now would be too low just before a batch. But
        # when no batch arrives for longer than usual, that has to count.
        usual = (last.at - first.at) / max(1, len(self._marks) - 1)
        until = now if now - last.at > 2 * usual + _MARK_EVERY_NS else last.at
        if until <= first.at:
            return {}
        span_s = (until - first.at) / 1e9
        return {w: (count - first.frames.get(w, 0)) / span_s for w, count in last.frames.items()}


def _figures(tally: _Tally, fate: Frames, rate: float, elapsed_s: float) -> dict[str, Any]:
    """What is told alike of one worker and of all together; ``rate``: the recent frames/s."""
    return {
        "frames_per_s": rate,
        "mean_frames_per_s": tally.lags.total() / elapsed_s if elapsed_s else 0.0,
        "lag": Lags(dict(sorted(tally.lags.items()))),
        "times": _times(_sum((tally.before, tally.work)), tally.transfer_ns),
        "num_bytes": tally.num_bytes,
        "num_restarts": tally.num_restarts,
        "num_env_faults": tally.faults_before + tally.num_env_faults,
        "lost": dict(fate.lost),
        "may_be_lost": fate.at_most,
    }


def _sum(works: Iterable[WorkReport]) -> WorkReport:
    """The sum of their times; episodes are left out, as they belong to single rollouts."""
    times = map(sum, zip(*(work[:_NUM_TIMES] for work in works), strict=True))
    return WorkReport._make([*times, *NO_WORK[_NUM_TIMES:]])


def _times(work: WorkReport, transfer_ns: int) -> WorkerTimes:
    total = work.busy_ns + work.wait_ns
    if not total:
        return WorkerTimes()
    # Only some steps are timed, so the estimates may add up to more than the total.
    known = work.env_ns + work.policy_ns + work.swap_ns
    scale = min(1.0, work.busy_ns / known) / total if known else 0.0
    return WorkerTimes(
        env=work.env_ns * scale,
        policy=work.policy_ns * scale,
        swap=work.swap_ns * scale,
        other=max(0.0, work.busy_ns / total - known * scale),
        wait=work.wait_ns / total,
        transfer=min(1.0, transfer_ns / total),
        cpu=min(1.0, work.cpu_ns / work.busy_ns) if work.busy_ns else 0.0,
    )


def _shares(spent: Counter[str]) -> TrainerTimes:
    total = sum(spent.values())
    return TrainerTimes(**{name: ns / total for name, ns in spent.items()} if total else {})


def _recent() -> _Recent:
    return deque(maxlen=_RECENT_EPISODES)


def _means(metrics: Mapping[str, _Recent]) -> dict[str, float]:
    """The mean of each metric over the episodes that have one; NaN: none has."""
    known = {name: [v for v in recent if not math.isnan(v)] for name, recent in metrics.items()}
    return {
        name: sum(values) / len(values) if values else math.nan for name, values in known.items()
    }


def _episodes(
    count: int, recent: Iterable[tuple[float, int]], metrics: Mapping[str, float]
) -> EpisodeStats:
    if not count:
        return EpisodeStats(metrics=metrics)
    returns, lengths = (np.array(column) for column in zip(*recent, strict=True))
    with np.errstate(invalid="ignore"):  # rewards may be infinite
        return EpisodeStats(
            count,
            float(returns.mean()),
            float(lengths.mean()),
            float(returns.min()),
            float(returns.max()),
            metrics,
        )
