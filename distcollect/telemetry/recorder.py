"""The trainer's statistics: what workers delivered, and how time was spent."""

from __future__ import annotations

import contextlib
import math
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import add, attrgetter
from typing import Any, Literal, NamedTuple

import torch

from distcollect.common.clock import clock_ns
from distcollect.errors import EnvError
from distcollect.results import (
    EnvFault,
    EpisodeStats,
    Evaluation,
    EvaluationStats,
    Frames,
    InferenceStats,
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

_SUMS = [
    name for name in WorkReport.__annotations__ if name.endswith("_ns") or name.startswith("num_")
]
_sums_of = attrgetter(*_SUMS)
_RECENT_EPISODES = 100
_RECENT_FAULTS = 20
# The recent rate is the rate since the oldest mark in this period.
_RECENT_NS = 10_000_000_000
_MARK_EVERY_NS = 500_000_000


@dataclass(slots=True)
class _Tally:
    """Counters of one worker, or of all together.

    Attributes:
        metrics: for each metric, its values in the last episodes.
        incarnation: number of its present process; None before the first.
        lags: maps a policy lag, in versions, to the number of delivered frames that have it.
        counts: the times of a WorkReport and "transfer_ns", in which its rollouts were being
            fetched; and by their names in WorkerStats, what is only counted.
        sums: what is still to be added to them, of WorkReports.
        rested_ns: for how long the user had rested when its last rollout came.
    """

    metrics: dict[str, deque[float]]
    incarnation: int | None = None
    lags: Counter[int] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    sums: list[int] = field(default_factory=lambda: [0] * len(_SUMS))
    rested_ns: int = 0


class _Mark(NamedTuple):
    """Frames delivered up to the time ``at``, by worker_id."""

    at: int
    frames: Mapping[int, int]


class StatsRecorder:
    """Records what a collector does; every method may be called from any thread.

    Attributes:
        best: for "return" and each metric of which somebody asks: its highest mean of those
            evaluations that answered their weights, and these weights.
    """

    def __init__(
        self,
        clock: Callable[[], int] = clock_ns,
        *,
        trace: Trace | None = None,
        metrics: Sequence[str] = (),
        on_evaluation: Callable[[EvaluationStats], None] = lambda _: None,
    ) -> None:
        """Record for one collector.

        Args:
            clock: counts nanoseconds.
            trace: gets everything that takes time.
            metrics: names of the metrics of episodes.
            on_evaluation: called with each evaluation.
        """
        self._clock = clock
        self._on_evaluation = on_evaluation
        self._trace = trace
        self._names = metrics
        # Reentrant: garbage collection while it is held may close a collector.
        self._lock = threading.RLock()
        self._tallies: defaultdict[int, _Tally] = defaultdict(self._new_tally)
        self._servers: defaultdict[int, _Tally] = defaultdict(self._new_tally)
        self._activity: Activity | None = None  # before the first batch, at rest, and at the end
        self._since = 0
        self._spent: Counter[str] = Counter()
        self._rested_ns = 0  # that is in none of these
        self._has_ended = False
        self._marks: deque[_Mark] = deque()
        # Of the last episodes of all workers.
        self._recent: deque[tuple[float, int]] = deque(maxlen=_RECENT_EPISODES)
        self._metrics = self._new_tally().metrics
        self._faults: deque[EnvFault] = deque(maxlen=_RECENT_FAULTS)
        self._evaluation = EvaluationStats()
        self.best: dict[str, tuple[float, Mapping[str, torch.Tensor]]] = {}
        self._evaluated_at = 0
        self._logged: dict[str, float] = {}
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
            if interrupted is not None:
                self._switch("weights")
        try:
            yield
        finally:
            with self._lock:
                if interrupted is not None and self._activity == "weights":
                    self._switch(interrupted)

    def rest(self) -> None:
        """The user's cell has ended: no time counts before the next batch is requested."""
        with self._lock:
            if self._activity == "train":
                self._switch(None)

    def end(self) -> None:
        """No more batches are requested. A second call does nothing."""
        with self._lock:
            self._switch(None)
            self._has_ended = True

    def _switch(self, activity: Activity | None) -> None:
        """Count the time up to now for the present activity, if it changes."""
        if activity == self._activity or self._has_ended:
            return
        now = self._clock()
        if self._activity is not None:
            self._spent[self._activity] += now - self._since
            if self._trace is not None:
                self._trace.activity(self._activity, self._since, now)
        elif self._marks:
            rested_ns = now - self._since
            self._rested_ns += rested_ns
            self._marks = deque(mark._replace(at=mark.at + rested_ns) for mark in self._marks)
        else:
            self._marks.append(_Mark(now, {}))
        self._since, self._activity = now, activity

    # What comes from workers.

    def joined(self, worker_id: int, incarnation: int, *, is_server: bool = False) -> None:
        """A process has joined the slot of a worker, or of an inference server."""
        with self._lock:
            tally = self._servers[worker_id] if is_server else self._tallies[worker_id]
            tally.counts["num_restarts"] += tally.incarnation not in (None, incarnation)
            tally.incarnation = incarnation

    def collected(self, header: Header, asked_at: int | None = None) -> None:
        """A rollout is ready; ``asked_at``: when it was requested; None: it was collected here."""
        if self._trace is not None:
            process = None if asked_at is None else (header.worker_id, header.incarnation)
            self._trace.rollout(process, header.spans, asked_at or 0, self._clock())
        work = header.work
        with self._lock:
            tally = self._tallies[header.worker_id]
            rested_ns = self._rested_ns
            if self._activity is None and self._marks:
                rested_ns += self._clock() - self._since
            if rested_ns != tally.rested_ns:  # meanwhile the worker had to wait
                wait_ns = max(0, work.wait_ns - (rested_ns - tally.rested_ns))
                work, tally.rested_ns = work._replace(wait_ns=wait_ns), rested_ns
            tally.sums = [*map(add, tally.sums, _sums_of(work))]
            tally.counts["num_episodes"] += len(work.returns)
            self._faults.extend(header.faults)
            self._recent.extend(zip(work.returns, work.lengths, strict=True))
            for name, values in (work.metrics or {}).items():
                if name in self._metrics:  # another trainer may have others
                    self._metrics[name].extend(values)
                    tally.metrics[name].extend(values)

    def evaluated(self, evaluation: Evaluation) -> None:
        """Episodes were played to evaluate the policy."""
        with self._lock:
            for worker_id in evaluation.worker_id.tolist():
                self._tallies[worker_id].counts["num_evaluated"] += 1
            for worker_id, count in evaluation.num_env_faults.items():
                self._tallies[worker_id].counts["evaluation_faults"] += count
            self._faults.extend(evaluation.env_faults)
            summary = evaluation.summary()
            if summary.policy_version >= self._evaluation.policy_version:
                self._evaluation, self._evaluated_at = summary, self._clock()
            if evaluation.weights is not None:
                for name, best in self.best.items():
                    if (value := summary.mean_of(name)) > best[0] and math.isfinite(value):
                        self.best[name] = value, evaluation.weights
        self._on_evaluation(summary)

    def evaluation_failed(self, error: EnvError) -> None:
        """An env raised too often in an evaluation."""
        with self._lock:
            self._tallies[error.worker_id or 0].counts["evaluation_faults"] += error.num_env_faults
            self._faults.extend(error.env_faults)

    def log(self, values: Mapping[str, float]) -> None:
        """Keep the user's last values."""
        with self._lock:
            self._logged.update(values)

    def env_failed(self, faults: Iterable[EnvFault]) -> None:
        """An env of a worker raised too often; no header tells of its last faults."""
        with self._lock:
            self._faults.extend(faults)

    def pushed(self, push: PushTimes) -> None:
        """Weights were sent."""
        if self._trace is not None:
            self._trace.pushed(push)

    def fetched(self, worker_id: int, num_bytes: int, took_ns: int) -> None:
        """A rollout was fetched."""
        with self._lock:
            tally = self._tallies[worker_id]
            tally.counts["num_bytes"] += num_bytes
            tally.counts["transfer_ns"] += took_ns
        if self._trace is not None:
            now = self._clock()
            self._trace.fetched(worker_id, now - took_ns, now)

    def delivered(self, batch: Iterable[tuple[int, int, int]]) -> None:
        """A batch was delivered: worker_ids, lags, and the numbers of frames that have them."""
        with self._lock:
            for worker_id, lag, count in batch:
                self._tallies[worker_id].lags[lag] += count
            now = self._clock()
            if now - self._marks[-1].at >= _MARK_EVERY_NS:
                self._marks.append(self._mark(now))
                while len(self._marks) > 2 and self._marks[1].at <= now - _RECENT_NS:
                    self._marks.popleft()

    def _new_tally(self) -> _Tally:
        return _Tally({name: deque(maxlen=_RECENT_EPISODES) for name in self._names})

    def _mark(self, now: int) -> _Mark:
        return _Mark(now, {w: tally.lags.total() for w, tally in self._tallies.items()})

    def snapshot(
        self,
        about: Stats,
        *,
        states: Mapping[int, str],
        processes: Mapping[int, tuple[int, str]],
        ready: Mapping[int, int],
        ledger: LedgerReport | None,
        evaluating: Collection[int] = (),
    ) -> Stats:
        """Make a snapshot.

        Args:
            about: the values that are not recorded here.
            states: maps the worker_id of each present worker to its state.
            processes: maps a worker_id to the pid and host of its newest process.
            ready: maps a worker_id to its number of ready rollouts.
            ledger: what became of all frames; None: there is no ledger.
            evaluating: ids of the workers that collect nothing, but evaluate.
        """
        with self._lock:
            now, spent = self._since, self._spent.copy()
            if self._activity is not None:
                now = self._clock()
                spent[self._activity] += now - self._since
            elapsed_s = spent.total() / 1e9
            fates = ledger.workers if ledger else {}
            rates = self._rates(now)
            every = self._new_tally()
            for tally in self._servers.values():
                every.counts.update(tally.counts, server_restarts=tally.counts["num_restarts"])
            workers = {}
            for worker_id in sorted({*self._tallies, *states}):
                tally = self._tallies[worker_id]
                pid, host = processes.get(worker_id, (0, ""))
                every.lags.update(tally.lags)
                tally.counts.update(dict(zip(_SUMS, tally.sums, strict=True)))
                tally.sums = [0] * len(_SUMS)
                every.counts.update(tally.counts)
                workers[worker_id] = WorkerStats(
                    state=states.get(worker_id, "lost"),
                    pid=pid,
                    host=host,
                    frames=tally.lags.total(),
                    num_ready=ready.get(worker_id, 0),
                    evaluates=worker_id in evaluating,
                    num_episodes=tally.counts["num_episodes"],
                    num_evaluated=tally.counts["num_evaluated"],
                    metrics=_means(tally.metrics),
                    **_figures(
                        tally,
                        fates.get(worker_id, Frames()),
                        rates.get(worker_id, 0.0),
                        elapsed_s,
                    ),
                )
            return replace(
                about,
                elapsed_s=elapsed_s,
                delivered=every.lags.total(),
                episodes=self._episodes(every.counts["num_episodes"]),
                evaluation=self._evaluation_at(now),
                logged=dict(self._logged),
                trainer=_shares(spent),
                num_ready=sum(ready.values()),
                mean_ready=self._ready_when_asked / max(1, self._num_asked),
                env_faults=tuple(self._faults),
                workers=workers,
                **_figures(
                    every, ledger.total if ledger else Frames(), sum(rates.values()), elapsed_s
                ),
            )

    def _episodes(self, count: int) -> EpisodeStats:
        metrics = _means(self._metrics)
        if not count:
            return EpisodeStats(metrics=metrics)
        recent = torch.tensor(list(self._recent), dtype=torch.float64)
        return EpisodeStats.of(count, recent[:, 0], recent[:, 1], metrics)

    def _evaluation_at(self, now: int) -> EvaluationStats:
        if not self._evaluation.count:
            return self._evaluation
        # It may be later than the end of the last batch.
        return replace(self._evaluation, age_s=max(0, now - self._evaluated_at) / 1e9)

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
        "times": _times(tally.counts),
        "inference": _inference(tally.counts),
        "num_bytes": tally.counts["num_bytes"],
        "num_restarts": tally.counts["num_restarts"],
        "num_env_faults": fate.env_faults + tally.counts["evaluation_faults"],
        "lost": dict(fate.lost),
        "may_be_lost": fate.at_most,
    }


def _times(ns: Mapping[str, int]) -> WorkerTimes:
    busy, total = ns["busy_ns"], ns["busy_ns"] + ns["wait_ns"]
    if not total:
        return WorkerTimes()
    # Only some steps are timed, so the estimates may add up to more than the total.
    known = ns["env_ns"] + ns["policy_ns"] + ns["swap_ns"]
    scale = min(1.0, busy / known) / total if known else 0.0
    return WorkerTimes(
        env=ns["env_ns"] * scale,
        policy=ns["policy_ns"] * scale,
        swap=ns["swap_ns"] * scale,
        other=max(0.0, busy / total - known * scale),
        wait=ns["wait_ns"] / total,
        transfer=min(1.0, ns["transfer_ns"] / total),
        cpu=min(1.0, ns["cpu_ns"] / busy) if busy else 0.0,
    )


def _inference(sums: Mapping[str, int]) -> InferenceStats:
    if not (count := sums["num_answers"]):
        return InferenceStats(num_restarts=sums["server_restarts"])
    return InferenceStats(
        count,
        queue_s=sums["queue_ns"] / 1e9 / count,
        forward_s=sums["forward_ns"] / 1e9 / count,
        num_envs=sums["num_rows"] / count,
        fill=sums["num_rows"] / sums["num_computed"],
        num_restarts=sums["server_restarts"],
    )


def _shares(spent: Counter[str]) -> TrainerTimes:
    total = sum(spent.values())
    return TrainerTimes(**{name: ns / total for name, ns in spent.items()} if total else {})


def _means(metrics: Mapping[str, Iterable[float]]) -> dict[str, float]:
    """The mean of each metric over the episodes that have one; NaN: none has."""
    known = {name: [v for v in recent if not math.isnan(v)] for name, recent in metrics.items()}
    return {
        name: sum(values) / len(values) if values else math.nan for name, values in known.items()
    }
