"""The trainer's counters: what came from whom, and what it waited for."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from distcollect.common.clock import clock_ns
from distcollect.results import (
    EpisodeStats,
    Frames,
    Lags,
    LedgerReport,
    Stats,
    TrainerTimes,
    WorkerStats,
    WorkerTimes,
)
from distcollect.rollout.header import Header, WorkReport
from distcollect.telemetry.trace import PushTimes, Trace

Activity = Literal["train", "collect", "weights", "transfer", "assemble"]

_NO_FRAMES = Frames()
_RECENT_EPISODES = 100
# "Lately": the rate since the oldest mark within so long.
_RECENT_NS = 10_000_000_000
_MARK_EVERY_NS = 500_000_000


@dataclass
class _Tally:
    """Of one worker.

    Attributes:
        work: of its present process, as of its last rollout.
        before: of its earlier ones.
        transfer_ns: rollouts were on their way here.
    """

    incarnation: int = 0
    work: WorkReport = field(default_factory=WorkReport)
    before: WorkReport = field(default_factory=WorkReport)
    frames: int = 0
    lags: Counter[int] = field(default_factory=Counter)
    num_bytes: int = 0
    transfer_ns: int = 0
    num_restarts: int = 0
    num_env_faults: int = 0
    num_episodes: int = 0


@dataclass(frozen=True)
class _Mark:
    """Frames delivered until then, in all and by worker_id."""

    at: int
    frames: int
    by_worker: Mapping[int, int]


class StatsRecorder:
    """StepCounter what a collector does; any thread may write and read."""

    def __init__(self, clock: Callable[[], int] = clock_ns, *, trace: Trace | None = None) -> None:
        """Count, by a clock in nanoseconds; ``trace`` is told of all that has a time."""
        self._clock = clock
        self._trace = trace
        # Garbage may be collected under it, and with that a collector be closed.
        self._lock = threading.RLock()
        self._tallies: dict[int, _Tally] = {}
        self._begun_at: int | None = None
        self._ended_at: int | None = None
        self._activity: Activity = "train"
        self._since = 0
        self._spent: Counter[str] = Counter()
        self._frames = 0
        self._marks: deque[_Mark] = deque()
        self._num_episodes = 0
        self._recent: deque[tuple[float, int]] = deque(maxlen=_RECENT_EPISODES)
        self._num_asked = 0
        self._ready_when_asked = 0

    # What the thread that takes batches does.

    def found(self, num_ready: int) -> None:
        """When it asked for a batch, so many rollouts lay ready."""
        with self._lock:
            self._num_asked += 1
            self._ready_when_asked += num_ready

    def does(self, activity: Activity) -> None:
        """It does this from now on."""
        with self._lock:
            self._switch(activity)

    @contextlib.contextmanager
    def publishing(self) -> Iterator[None]:
        """Within, the calling thread sends weights: it may be another one than takes batches."""
        with self._lock:
            instead = self._activity if self._activity != "collect" else None
            if instead is not None and self._begun_at is not None:
                self._switch("weights")
        try:
            yield
        finally:
            with self._lock:
                if instead is not None and self._activity == "weights":
                    self._switch(instead)

    def end(self) -> None:
        """No batch is asked for any more. Again is no error."""
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
            self._marks.append(_Mark(now, 0, {}))
        else:
            self._spent[self._activity] += now - self._since
            if self._trace is not None:
                self._trace.does(self._activity, self._since, now)
        self._activity, self._since = activity, now

    # What comes from workers.

    def joined(self, worker_id: int, incarnation: int) -> None:
        """A process is in a slot."""
        with self._lock:
            tally = self._tallies.setdefault(worker_id, _Tally(incarnation))
            if incarnation != tally.incarnation:
                tally.before = _sum(tally.before, tally.work)
                tally.work = WorkReport()
                tally.num_restarts += 1
                tally.num_env_faults = 0
                tally.incarnation = incarnation

    def collected(self, header: Header, asked_at: int | None = None) -> None:
        """A rollout lies ready that a worker was asked for then; None: it was collected here."""
        if self._trace is not None:
            self._trace_rollout(self._trace, header, asked_at)
        work = header.work
        with self._lock:
            tally = self._tallies.setdefault(header.worker_id, _Tally(header.incarnation))
            if tally.incarnation != header.incarnation:
                return  # of a process that is gone
            tally.work = work
            tally.num_env_faults = header.env_faults
            if work.returns:
                tally.num_episodes += len(work.returns)
                self._num_episodes += len(work.returns)
                self._recent.extend(zip(work.returns, work.lengths, strict=True))

    def _trace_rollout(self, trace: Trace, header: Header, asked_at: int | None) -> None:
        if asked_at is None:
            trace.rollout_here(header.spans)
            return
        now = self._clock()
        trace.rollout(header.worker_id, header.incarnation, header.spans, asked_at, now)

    def pushed(self, push: PushTimes) -> None:
        """Weights were sent."""
        if self._trace is not None:
            self._trace.pushed(push)

    def fetched(self, worker_id: int, num_bytes: int, took_ns: int) -> None:
        """A rollout came here."""
        with self._lock:
            tally = self._tallies.setdefault(worker_id, _Tally())
            tally.num_bytes += num_bytes
            tally.transfer_ns += took_ns
        if self._trace is not None:
            now = self._clock()
            self._trace.fetched(worker_id, now - took_ns, now)

    def delivered(self, batch: Iterable[tuple[int, Sequence[tuple[int, int]]]]) -> None:
        """A batch is there: of each rollout worker_id and its (lag, frames that have it)."""
        with self._lock:
            for worker_id, lags in batch:
                tally = self._tallies.setdefault(worker_id, _Tally())
                for lag, count in lags:
                    tally.lags[lag] += count
                    tally.frames += count
                    self._frames += count
            now = self._clock()
            if now - self._marks[-1].at >= _MARK_EVERY_NS:
                self._marks.append(self._mark(now))
                while len(self._marks) > 2 and self._marks[1].at <= now - _RECENT_NS:
                    self._marks.popleft()

    def _mark(self, now: int) -> _Mark:
        by_worker = {worker_id: tally.frames for worker_id, tally in self._tallies.items()}
        return _Mark(now, self._frames, by_worker)

    def snapshot(
        self,
        about: Stats,
        *,
        states: Mapping[int, str],
        ready: Mapping[int, int],
        ledger: LedgerReport | None,
    ) -> Stats:
        """All of it.

        Args:
            about: what it can't know.
            states: of the workers that there are.
            ready: worker_id to rollouts that lie ready.
            ledger: where their frames went.
        """
        with self._lock:
            now = self._clock() if self._ended_at is None else self._ended_at
            spent = self._spent.copy()
            begun_at = now if self._begun_at is None else self._begun_at
            if self._begun_at is not None:
                spent[self._activity] += now - self._since
            elapsed_s = (now - begun_at) / 1e9
            rate_of = self._rates(now)
            workers = {}
            for worker_id in sorted(self._tallies.keys() | states.keys()):
                tally = self._tallies.get(worker_id, _Tally())
                frames = ledger.workers.get(worker_id, _NO_FRAMES) if ledger else _NO_FRAMES
                workers[worker_id] = WorkerStats(
                    state=states.get(worker_id, "lost"),
                    frames=tally.frames,
                    frames_per_s=rate_of(worker_id),
                    mean_frames_per_s=tally.frames / elapsed_s if elapsed_s else 0.0,
                    lag=_lags(tally.lags),
                    times=_times(_sum(tally.before, tally.work), tally.transfer_ns),
                    num_bytes=tally.num_bytes,
                    num_ready=ready.get(worker_id, 0),
                    num_restarts=tally.num_restarts,
                    num_env_faults=tally.num_env_faults,
                    num_episodes=tally.num_episodes,
                    lost=dict(frames.lost),
                    may_be_lost=frames.at_most,
                )
            tallies = list(self._tallies.values())
            together = WorkReport()
            lags: Counter[int] = Counter()
            for tally in tallies:
                together = _sum(_sum(together, tally.before), tally.work)
                lags.update(tally.lags)
            return replace(
                about,
                elapsed_s=elapsed_s,
                delivered=self._frames,
                frames_per_s=rate_of(None),
                mean_frames_per_s=self._frames / elapsed_s if elapsed_s else 0.0,
                lag=_lags(lags),
                episodes=_episodes(self._num_episodes, self._recent),
                trainer=_shares(spent),
                times=_times(together, sum(tally.transfer_ns for tally in tallies)),
                num_bytes=sum(tally.num_bytes for tally in tallies),
                num_ready=sum(ready.values()),
                mean_ready=self._ready_when_asked / max(1, self._num_asked),
                num_restarts=sum(tally.num_restarts for tally in tallies),
                lost=dict(ledger.total.lost) if ledger else {},
                may_be_lost=ledger.total.at_most if ledger else 0,
                workers=workers,
            )

    def _rates(self, now: int) -> Callable[[int | None], float]:
        """Frames/s of late of a worker; of all for None."""
        if not self._marks:
            return lambda _: 0.0
        first = self._marks[0]
        last = self._marks[-1] if len(self._marks) > 1 else self._mark(now)
        # Frames that come in large batches have come since the one before. When no batch has come
        # for longer than usual, that counts.
        until = last.at
        usual = (last.at - first.at) / max(1, len(self._marks) - 1)
        if now - last.at > 2 * usual + _MARK_EVERY_NS:
            until = now
        span_s = (until - first.at) / 1e9

        def rate(worker_id: int | None) -> float:
            if span_s <= 0:
                return 0.0
            if worker_id is None:
                return (last.frames - first.frames) / span_s
            came = last.by_worker.get(worker_id, 0) - first.by_worker.get(worker_id, 0)
            return came / span_s

        return rate


def _sum(one: WorkReport, other: WorkReport) -> WorkReport:
    """Their times; episodes belong to a rollout."""
    return WorkReport(
        one.busy_ns + other.busy_ns,
        one.env_ns + other.env_ns,
        one.policy_ns + other.policy_ns,
        one.swap_ns + other.swap_ns,
        one.wait_ns + other.wait_ns,
        one.cpu_ns + other.cpu_ns,
    )


def _times(work: WorkReport, transfer_ns: int) -> WorkerTimes:
    total = work.busy_ns + work.wait_ns
    if not total:
        return WorkerTimes()
    # Most steps are not timed, so that what was found may come to more than all.
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


def _lags(counts: Counter[int]) -> Lags:
    return Lags(dict(sorted(counts.items())))


def _episodes(count: int, recent: Iterable[tuple[float, int]]) -> EpisodeStats:
    if not count:
        return EpisodeStats()
    returns, lengths = (np.array(column) for column in zip(*recent, strict=True))
    with np.errstate(invalid="ignore"):  # rewards may be infinite
        return EpisodeStats(
            count,
            float(returns.mean()),
            float(lengths.mean()),
            float(returns.min()),
            float(returns.max()),
        )
