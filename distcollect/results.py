"""What users are given beside batches: statistics, evaluations, and what became of the frames."""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from operator import mul
from typing import Any, NamedTuple, TypeVar, cast

import torch

from distcollect.common.tables import text_table

_Episodes = TypeVar("_Episodes", bound="EpisodeStats")


@dataclass(frozen=True)
class WorkerTimes:
    """How one worker, or all workers together, spent their time: shares from 0 to 1.

    The first five add up to 1; before the first rollout, all are 0.

    Attributes:
        env: stepping and resetting envs.
        policy: choosing actions.
        swap: swapping new weights in.
        other: everything else while collecting, such as writing frames to memory.
        wait: waiting for a request between two rollouts.
        transfer: the share of time in which a rollout was on its way to the trainer; it overlaps
            with the others.
        cpu: of the time spent collecting, the share in which the thread that steps the envs used a
            CPU. It is low if envs sleep or wait, or if other processes take the CPU.
    """

    env: float = 0.0
    policy: float = 0.0
    swap: float = 0.0
    other: float = 0.0
    wait: float = 0.0
    transfer: float = 0.0
    cpu: float = 0.0


@dataclass(frozen=True)
class InferenceStats:
    """How inference servers answered workers; NaN without an answer.

    Attributes:
        num_answers: number of answers.
        queue_s: mean number of seconds from a worker's request until it was computed.
        forward_s: mean number of seconds that the policy took.
        num_envs: mean number of envs in the batch that a worker's request was computed in.
        fill: share of these batches that were envs; the rest was padding.
        num_restarts: number of times that a server's process was replaced.
    """

    num_answers: int = 0
    queue_s: float = math.nan
    forward_s: float = math.nan
    num_envs: float = math.nan
    fill: float = math.nan
    num_restarts: int = 0


@dataclass(frozen=True)
class TrainerTimes:
    """How the thread that takes batches spent its time: shares from 0 to 1 that add up to 1.

    Attributes:
        train: between two batches, in your code; after ``start()``, waiting because of a rate
            limit or a pause.
        collect: waiting for rollouts that are being collected; in collectors that step envs
            themselves, stepping them.
        weights: packing and sending weights, and waiting until workers have them.
        transfer: waiting for the arrival of rollouts that are ready.
        assemble: making batches out of rollouts.
    """

    train: float = 0.0
    collect: float = 0.0
    weights: float = 0.0
    transfer: float = 0.0
    assemble: float = 0.0


@dataclass(frozen=True)
class Lags:
    """Policy lags of delivered frames: how many newer versions had been sent to their worker.

    Attributes:
        frames: maps a lag, in versions, to the number of delivered frames with this lag; in order
            of lag.
    """

    frames: Mapping[int, int] = field(default_factory=dict)

    @property
    def mean(self) -> float:
        """Mean lag of all frames; 0.0 if there are none."""
        return sum(lag * n for lag, n in self.frames.items()) / max(1, sum(self.frames.values()))

    @property
    def max(self) -> int:
        """The highest lag; 0 if there are no frames."""
        return max(self.frames, default=0)


class LagStats(NamedTuple):
    """Lags, or ages, of one batch's frames, in versions.

    Attributes:
        min: the lowest.
        mean: the mean over the frames.
        max: the highest.
    """

    min: int
    mean: float
    max: int

    @classmethod
    def of(cls, lags: Sequence[int], nums: Sequence[int]) -> LagStats:
        """From lags, in any order, and the numbers of frames that have them."""
        return cls(min(lags), sum(map(mul, lags, nums)) / sum(nums), max(lags))


@dataclass(frozen=True)
class EpisodeStats:
    """Episodes that were ended by their env or by ``max_frames_per_traj``.

    All but the count are of the last hundred episodes, or of all episodes of an evaluation. They
    are NaN before the first has ended.

    Attributes:
        count: number of episodes that have ended.
        mean_return: mean sum of rewards.
        mean_length: mean length, in frames.
        min_return: lowest sum of rewards.
        max_return: highest sum of rewards.
        metrics: mean of each metric of ``Monitor(metrics=...)``, by name.
    """

    count: int = 0
    mean_return: float = math.nan
    mean_length: float = math.nan
    min_return: float = math.nan
    max_return: float = math.nan
    metrics: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls: type[_Episodes],
        count: int,
        returns: torch.Tensor,
        lengths: torch.Tensor,
        metrics: Mapping[str, float],
    ) -> _Episodes:
        """From the returns and lengths ``[E]`` of the last E episodes out of ``count``."""
        ends = returns.min().item(), returns.max().item()
        return cls(count, returns.mean().item(), lengths.double().mean().item(), *ends, metrics)

    def mean_of(self, name: str) -> float:
        """The mean of a metric, or of "return"."""
        return self.mean_return if name == "return" else self.metrics[name]


@dataclass(frozen=True)
class EvaluationStats(EpisodeStats):
    """The episodes of an evaluation.

    Attributes:
        policy_version: the newest version that played them.
        age_s: seconds since it ended; NaN: there is none.
    """

    policy_version: int = 0
    age_s: float = math.nan


@dataclass(frozen=True)
class EnvFault:
    """An env raised. It was replaced, or its worker ended if it had raised too often.

    Attributes:
        worker_id: the worker that steps the env.
        incarnation: number of the process in the worker's slot, counted from 0.
        host: name of the worker's host.
        time: when it raised, by the clock of that host, in seconds since 1970.
        message: names the env, its method and the error.
    """

    worker_id: int = 0
    incarnation: int = 0
    host: str = ""
    time: float = 0.0
    message: str = ""


@dataclass(frozen=True)
class _Figures:
    """What statistics of one worker and of all workers have in common."""

    frames: int = 0
    frames_per_s: float = 0.0
    mean_frames_per_s: float = 0.0
    lag: Lags = Lags()
    times: WorkerTimes = WorkerTimes()
    inference: InferenceStats = InferenceStats()
    num_bytes: int = 0
    num_ready: int = 0
    num_restarts: int = 0
    num_env_faults: int = 0
    lost: Mapping[str, int] = field(default_factory=dict)
    may_be_lost: int = 0

    @property
    def num_lost(self) -> int:
        """Number of frames that were stepped and not delivered."""
        return sum(self.lost.values())


@dataclass(frozen=True)
class WorkerStats(_Figures):
    """Statistics of one worker: of all processes that have had its worker_id.

    Attributes:
        state: "joining", "ready", "suspected", "lost" or "left".
        pid: of its newest process; 0 if that is not known. In ``ps -e`` it is ``dc-worker-3``.
        host: on which that runs, or ran.
        frames: number of frames delivered.
        frames_per_s: recent rate, see :class:`Stats`.
        mean_frames_per_s: mean rate since the first batch was requested.
        lag: policy lags of its delivered frames.
        times: how it spent its time.
        inference: how an inference server answered it.
        num_bytes: size in bytes of its rollouts that were fetched.
        num_ready: number of its rollouts that are ready and not delivered yet.
        num_restarts: number of times its process was replaced.
        num_env_faults: number of times an env raised, also in evaluations.
        num_episodes: number of episodes that ended.
        lost: number of frames that were stepped and not delivered, by cause.
        may_be_lost: at most this many more frames are lost, if its host vanished with the count.
        metrics: mean of each metric over its last hundred episodes; see :class:`EpisodeStats`.
        evaluates: whether it evaluates the policy, and collects nothing.
        num_evaluated: number of episodes that it played in evaluations.
    """

    state: str = "ready"
    pid: int = 0
    host: str = ""
    evaluates: bool = False
    num_episodes: int = 0
    num_evaluated: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Stats(_Figures, dict[str, Any]):
    """A snapshot of what a collector has done so far; ``collector.stats()`` makes one.

    It is also a dict of plain numbers and strings, with TorchRL's names for them: ``"frames"``,
    ``"batches"``, ``"completed"``, ``"total_frames"`` (not in an endless collector),
    ``"requested_frames_per_batch"``, ``"policy_version"``, ``"workers"`` and ``"workers_alive"``.

    Attributes:
        collector: name of its class.
        elapsed_s: seconds since the first batch was requested; in a notebook without those between
            the end of a cell and the next batch.
        frames: number of frames collected, with padding and with those of the run that was resumed.
        resumed_frames: how many of these are from the run that was resumed.
        total_frames: number of frames after which it ends; -1: it never ends.
        delivered: number of frames, without padding, that this collector delivered, or handed over
            to another trainer.
        frames_per_s: recent rate: over ten seconds, or over the last batch if that took longer.
        mean_frames_per_s: mean rate over ``elapsed_s``.
        policy_version: version of the weights that were published last.
        lag: policy lags of the delivered frames.
        episodes: episodes that ended.
        evaluation: the evaluation of the newest version so far, by ``evaluate()`` or by
            :class:`~distcollect.EvaluationWorkers`.
        logged: the last value of each name that was passed to ``log()``.
        trainer: how the thread that takes batches spent its time.
        times: how all workers together spent their time.
        inference: how inference servers answered them.
        num_bytes: size in bytes of all rollouts fetched from workers.
        num_ready: number of rollouts that are ready and not delivered yet.
        mean_ready: the mean of this number over the moments when a batch was requested.
        num_restarts: number of times that processes of workers and of servers were replaced.
        num_env_faults: number of times that envs raised, also in evaluations.
        env_faults: the last twenty of these, the newest last.
        lost: number of frames that were stepped and not delivered, by cause.
        may_be_lost: at most this many more frames are lost, on hosts that vanished.
        sync: whether a batch is collected when it is requested.
        in_process: whether the collector steps its envs itself.
        staleness: the mode of its :class:`~distcollect.Staleness`; "": it has none.
        has_weights: whether there are weights that can be published to workers.
        num_cores: number of cores that workers may keep busy on their hosts; 0 if unknown.
        load: how many threads beside the trainer's wanted one of these cores in the last minute; 0
            if the workers are on other hosts.
        inference_choice: what ``Inference("auto")`` chose, and why.
        ended: whether it was shut down.
        workers: statistics of each worker, by worker_id; lost ones, and those that left, stay.
        num_batches: number of batches collected.
        frames_per_batch: number of frames in each batch.
    """

    collector: str = ""
    elapsed_s: float = 0.0
    resumed_frames: int = 0
    total_frames: int = -1
    delivered: int = 0
    policy_version: int = 0
    episodes: EpisodeStats = EpisodeStats()
    evaluation: EvaluationStats = EvaluationStats()
    logged: Mapping[str, float] = field(default_factory=dict)
    trainer: TrainerTimes = TrainerTimes()
    mean_ready: float = 0.0
    env_faults: Sequence[EnvFault] = ()
    sync: bool = False
    in_process: bool = False
    staleness: str = ""
    has_weights: bool = False
    num_cores: int = 0
    load: float = 0.0
    inference_choice: str = ""
    ended: bool = False
    workers: Mapping[int, WorkerStats] = field(default_factory=dict)
    num_batches: int = 0
    frames_per_batch: int = 0

    def __post_init__(self) -> None:
        entries = _single(self.as_dict())
        entries["batches"] = self.num_batches
        entries["requested_frames_per_batch"] = self.frames_per_batch
        if self.total_frames == -1:
            del entries["total_frames"]
        else:
            entries["completed"] = self.frames >= self.total_frames
        if not self.in_process:
            entries["workers"] = len(self.workers)
            entries["workers_alive"] = sum(w.state == "ready" for w in self.workers.values())
        self.update(entries)

    def per_worker(self) -> dict[str, Any]:
        """The plain numbers of each worker, as ``"worker_0/frames"``."""
        return {
            f"worker_{worker_id}/{name}": value
            for worker_id, worker in self.workers.items()
            for name, value in _single(_plain(worker)).items()
        }

    @property
    def remaining_s(self) -> float | None:
        """Seconds until ``total_frames`` at the recent rate; None without a total or a rate."""
        if self.total_frames == -1 or not self.frames_per_s:
            return None
        collected = self.frames - self.resumed_frames
        # Padding counts towards the total, but not in the rate.
        delivered = sum(self.lag.frames.values())  # also for trajectories that nobody has yet
        real = min(1.0, delivered / collected) if delivered and collected else 1.0
        return max(0, self.total_frames - self.frames) * real / self.frames_per_s

    def as_dict(self) -> dict[str, Any]:
        """All fields as a dict that JSON can hold; NaN and infinity become None."""
        return {each.name: _plain(getattr(self, each.name)) for each in fields(self)}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Stats:
        """The inverse of :meth:`as_dict`: ignores unknown entries; missing ones get defaults."""
        stats: Stats = _read(cls(), given)
        return stats


def _read(default: Any, given: Any) -> Any:
    """Make a value like ``default`` of what JSON has of it, where null stands for NaN."""
    if not is_dataclass(default):
        return math.nan if given is None else given
    known, kind = vars(default), cast("Any", type(default))
    read = {name: _read(known[name], value) for name, value in given.items() if name in known}
    for name in read.keys() & {"metrics", "logged"}:
        read[name] = {label: _read(math.nan, value) for label, value in read[name].items()}
    if isinstance(default, Lags):
        read = {"frames": {int(lag): count for lag, count in given.get("frames", {}).items()}}
    elif isinstance(default, Stats):
        worker = WorkerStats()
        workers = given.get("workers", {}).items()
        read["workers"] = {int(worker_id): _read(worker, each) for worker_id, each in workers}
        faults = given.get("env_faults", ())
        read["env_faults"] = tuple(_read(EnvFault(), fault) for fault in faults)
    return kind(**read)


def _single(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that are numbers, strings or None."""
    return {n: v for n, v in entries.items() if v is None or isinstance(v, int | float | str)}


def _plain(value: Any) -> Any:
    """``value`` for JSON; asdict() would copy everything first, and there may be 1,000 workers."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, int | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, Sequence):
        return [_plain(each) for each in value]
    return {name: _plain(each) for name, each in vars(value).items()}


@dataclass(frozen=True)
class Evaluation:
    """The results of a policy in E whole episodes, in no particular order.

    Attributes:
        returns: float64 ``[E]``, the sum of rewards of each episode.
        lengths: int64 ``[E]``, the length of each episode in frames.
        policy_version: int64 ``[E]``, the version of the policy that played the episode; with an
            inference server, the newest that did, as newer weights may come within an episode.
        worker_id: int64 ``[E]``, the worker that played the episode.
        metrics: for each metric of ``Monitor(metrics=...)``, float64 ``[E]``: its values.
        num_env_faults: how often envs raised meanwhile, by worker_id.
        env_faults: the last twenty of these of each worker.
        weights: of the policy, by name, on the way to a :class:`Checkpoint`; users get None.
    """

    returns: torch.Tensor
    lengths: torch.Tensor
    policy_version: torch.Tensor
    worker_id: torch.Tensor
    metrics: Mapping[str, torch.Tensor] = field(default_factory=dict)
    num_env_faults: Mapping[int, int] = field(default_factory=dict)
    env_faults: Sequence[EnvFault] = ()
    weights: Mapping[str, torch.Tensor] | None = None

    @classmethod
    def joined(cls, parts: Sequence[Evaluation]) -> Evaluation:
        """The episodes of all ``parts``."""
        num_env_faults: Counter[int] = Counter()
        for part in parts:
            num_env_faults.update(part.num_env_faults)
        return cls(
            torch.cat([part.returns for part in parts]),
            torch.cat([part.lengths for part in parts]),
            torch.cat([part.policy_version for part in parts]),
            torch.cat([part.worker_id for part in parts]),
            {name: torch.cat([p.metrics[name] for p in parts]) for name in parts[0].metrics},
            num_env_faults,
            tuple(fault for part in parts for fault in part.env_faults),
            next((part.weights for part in parts if part.weights is not None), None),
        )

    @property
    def mean_return(self) -> float:
        """Mean of the returns, NaN without episodes."""
        return self.returns.mean().item()

    @property
    def mean_length(self) -> float:
        """Mean of the lengths in frames, NaN without episodes."""
        return self.lengths.double().mean().item()

    def summary(self) -> EvaluationStats:
        """The statistics of its episodes; one whose metric is NaN does not count in that metric."""
        metrics = {name: values.nanmean().item() for name, values in self.metrics.items()}
        summary = EvaluationStats.of(len(self.returns), self.returns, self.lengths, metrics)
        return replace(summary, policy_version=int(self.policy_version.max()))


@dataclass(frozen=True)
class Frames:
    """Numbers of frames of one worker, or of all workers.

    Attributes:
        stepped: frames that the envs stepped, as far as the trainer knows.
        delivered: frames that were delivered.
        lost: frames that will never be delivered, by cause.
        open: frames that were stepped, and are neither delivered nor lost yet.
        at_most: at most this many more frames were stepped and lost, on hosts that vanished.
        env_faults: how often an env raised.
    """

    stepped: int = 0
    delivered: int = 0
    lost: Mapping[str, int] = field(default_factory=dict)
    open: int = 0
    at_most: int = 0
    env_faults: int = 0


@dataclass(frozen=True)
class LedgerReport:
    """What became of all frames; ``str()`` of it is a table.

    Attributes:
        workers: the frames of each worker, by worker_id; of all processes that have had this id.
        total: the frames of all workers together.
    """

    workers: Mapping[int, Frames]
    total: Frames

    def __str__(self) -> str:
        frames = [*self.workers.values(), self.total]
        columns = {
            "stepped": [f.stepped for f in frames],
            "delivered": [f.delivered for f in frames],
            **{f"lost: {c}": [f.lost.get(c, 0) for f in frames] for c in sorted(self.total.lost)},
            "open": [f.open for f in frames],
        }
        if self.total.at_most:
            columns["at most more"] = [f.at_most for f in frames]
        if self.total.env_faults:
            columns["env faults"] = [f.env_faults for f in frames]
        rows = [["worker", *columns]]
        for name, *numbers in zip([*self.workers, "all"], *columns.values(), strict=True):
            rows.append([str(name), *(f"{number:,}" for number in numbers)])
        return text_table(rows)


class WorkerThroughput(NamedTuple):
    """How fast a worker is.

    Attributes:
        num_rollouts: number of rollouts that it has collected, in all its processes.
        mean_s: mean number of seconds from the request for a rollout until it was ready.
        num_preempted: how many of the rollouts were ended early because the worker was slow.
    """

    num_rollouts: int = 0
    mean_s: float = 0.0
    num_preempted: int = 0


class WorkerState(enum.Enum):
    """What the trainer knows of a worker.

    Attributes:
        JOINING: its process is starting, the first one or a replacement.
        READY: it is present.
        SUSPECTED: it has given no sign of life for a while, but still counts as present.
        LOST: it is gone, and won't be replaced.
        LEFT: it was told to leave, and has left.
    """

    JOINING = "joining"
    READY = "ready"
    SUSPECTED = "suspected"
    LOST = "lost"
    LEFT = "left"
