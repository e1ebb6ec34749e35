"""Statistics: a snapshot of what a collector has done, and what worker processes report."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from distcollect.common.tables import text_table


@dataclass(frozen=True)
class WorkerTimes:
    """How one worker, or all of them together, spent their time: shares from 0 to 1.

    The first five add up to 1; until the first rollout has come, all are 0.

    Attributes:
        env: stepping and resetting envs.
        policy: choosing actions.
        swap: swapping new weights in.
        other: everything else while collecting, such as writing frames to memory.
        wait: waiting for a request between two rollouts.
        transfer: the share of time in which a rollout was on its way to the trainer; it overlaps
            with the others.
        cpu: of the time spent collecting, the share in which the stepping thread used a CPU. It is
            low if envs sleep or wait, or if other processes take the CPU.
    """

    env: float = 0.0
    policy: float = 0.0
    swap: float = 0.0
    other: float = 0.0
    wait: float = 0.0
    transfer: float = 0.0
    cpu: float = 0.0


@dataclass(frozen=True)
class TrainerTimes:
    """How the thread that takes batches spent its time, as shares that add up to 1.

    Attributes:
        train: between two batches, in your code; after ``start()``, held up by a rate limit or a
            pause.
        collect: waiting for rollouts that are being collected; in collectors that step envs
            themselves, stepping them.
        weights: packing and sending weights, and waiting until workers have them.
        transfer: waiting for rollouts that are ready to arrive.
        assemble: making batches of them.
    """

    train: float = 0.0
    collect: float = 0.0
    weights: float = 0.0
    transfer: float = 0.0
    assemble: float = 0.0


@dataclass(frozen=True)
class Lags:
    """How many versions behind the policy of delivered frames was.

    Attributes:
        frames: maps a lag, in versions, to the number of delivered frames that have it; in order
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

    def quantile(self, share: float) -> int:
        """The smallest lag that at least this share (0 to 1) of the frames does not exceed."""
        missing = share * sum(self.frames.values())
        for lag, count in self.frames.items():
            missing -= count
            if missing <= 0:
                return lag
        return self.max


@dataclass(frozen=True)
class EpisodeStats:
    """Episodes that ended because the env, or ``max_frames_per_traj``, said so.

    Attributes:
        count: how many have ended.
        mean_return: mean sum of rewards of the last hundred; NaN before the first has ended, as
            the next three are.
        mean_length: their mean length, in frames.
        min_return: their lowest sum of rewards.
        max_return: their highest.
    """

    count: int = 0
    mean_return: float = math.nan
    mean_length: float = math.nan
    min_return: float = math.nan
    max_return: float = math.nan


@dataclass(frozen=True)
class WorkerStats:
    """Statistics of one worker, that is, of all processes that had its worker_id.

    Attributes:
        state: "joining", "ready", "suspected", "lost" or "left".
        frames: frames delivered.
        frames_per_s: recent rate, see :class:`Stats`.
        mean_frames_per_s: mean rate since the first batch was asked for.
        lag: policy lag of its delivered frames.
        times: how it spent its time.
        num_bytes: size of its rollouts that were fetched.
        num_ready: its rollouts that are ready and not delivered yet.
        num_restarts: how often its process was replaced.
        num_env_faults: how often an env raised in the present process.
        num_episodes: episodes that ended.
        lost: frames that were stepped and not delivered, by cause.
        may_be_lost: how many more may be lost, at most, if its host vanished along with the count.
    """

    state: str = "ready"
    frames: int = 0
    frames_per_s: float = 0.0
    mean_frames_per_s: float = 0.0
    lag: Lags = Lags()
    times: WorkerTimes = WorkerTimes()
    num_bytes: int = 0
    num_ready: int = 0
    num_restarts: int = 0
    num_env_faults: int = 0
    num_episodes: int = 0
    lost: Mapping[str, int] = field(default_factory=dict)
    may_be_lost: int = 0


@dataclass(frozen=True)
class Stats:
    """A snapshot of what a collector has done so far; ``collector.stats()`` makes one.

    Attributes:
        collector: name of its class.
        elapsed_s: seconds since the first batch was asked for.
        frames: frames collected, with padding and with those of the run that was resumed.
        resumed_frames: how many of these are from the run that was resumed.
        total_frames: frames until it ends; -1: endless.
        delivered: real frames that this collector delivered, or handed over to another trainer.
        frames_per_s: recent rate: over ten seconds, or over the last batch if that took longer.
        mean_frames_per_s: mean rate over ``elapsed_s``.
        policy_version: version of the weights that were published last.
        lag: policy lag of the delivered frames.
        episodes: episodes that ended.
        trainer: how the thread that takes batches spent its time.
        times: how all workers together spent theirs.
        num_bytes: size of all rollouts fetched from workers.
        num_ready: rollouts that are ready and not delivered yet.
        mean_ready: their mean number at the moments when a batch was asked for.
        num_restarts: how often worker processes were replaced.
        lost: frames that were stepped and not delivered, by cause.
        may_be_lost: how many more may be lost, at most, on hosts that vanished.
        sync: whether a batch is collected when it is asked for.
        in_process: whether the collector steps its envs itself.
        num_cores: cores of this host, if all workers are on it; otherwise 0.
        ended: whether it was shut down.
        workers: statistics of each worker, by worker_id.
    """

    collector: str = ""
    elapsed_s: float = 0.0
    frames: int = 0
    resumed_frames: int = 0
    total_frames: int = -1
    delivered: int = 0
    frames_per_s: float = 0.0
    mean_frames_per_s: float = 0.0
    policy_version: int = 0
    lag: Lags = Lags()
    episodes: EpisodeStats = EpisodeStats()
    trainer: TrainerTimes = TrainerTimes()
    times: WorkerTimes = WorkerTimes()
    num_bytes: int = 0
    num_ready: int = 0
    mean_ready: float = 0.0
    num_restarts: int = 0
    lost: Mapping[str, int] = field(default_factory=dict)
    may_be_lost: int = 0
    sync: bool = False
    in_process: bool = False
    num_cores: int = 0
    ended: bool = False
    workers: Mapping[int, WorkerStats] = field(default_factory=dict)

    @property
    def remaining_s(self) -> float | None:
        """Seconds until ``total_frames`` at the recent rate; None if that can't be told."""
        if self.total_frames == -1 or not self.frames_per_s:
            return None
        collected = self.frames - self.resumed_frames
        # Padding counts towards the total, and not for the rate.
        real = min(1.0, self.delivered / collected) if self.delivered and collected else 1.0
        return max(0, self.total_frames - self.frames) * real / self.frames_per_s

    def as_dict(self) -> dict[str, Any]:
        """All of it as a dict that JSON can hold; NaN and infinity become None."""
        plain: dict[str, Any] = _plain(self)
        return plain

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Stats:
        """Reads :meth:`as_dict`; unknown entries are ignored, and missing ones get defaults."""
        parts: dict[str, Callable[[Any], Any]] = {
            "lag": _lags,
            "episodes": lambda value: _known(EpisodeStats, value),
            "trainer": lambda value: _known(TrainerTimes, value),
            "times": lambda value: _known(WorkerTimes, value),
            "workers": lambda value: {int(w): _worker(each) for w, each in value.items()},
        }
        read = {k: parts[k](v) if k in parts else v for k, v in given.items()}
        stats: Stats = _known(cls, read)
        return stats


def _worker(given: Mapping[str, Any]) -> WorkerStats:
    times = _known(WorkerTimes, given.get("times", {}))
    read = {**given, "lag": _lags(given.get("lag", {})), "times": times}
    worker: WorkerStats = _known(WorkerStats, read)
    return worker


def _lags(given: Mapping[str, Any]) -> Lags:
    return Lags({int(lag): count for lag, count in given.get("frames", {}).items()})


def _known(kind: Any, given: Mapping[str, Any]) -> Any:
    """``kind`` from those entries that it has; JSON has no NaN, so that is null."""
    fields = kind.__dataclass_fields__
    return kind(**{k: math.nan if v is None else v for k, v in given.items() if k in fields})


def _plain(value: Any) -> Any:
    """By hand, as there may be a thousand workers: asdict() copies all of it first."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, int | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    return {name: _plain(each) for name, each in vars(value).items()}


@dataclass(frozen=True)
class Evaluation:
    """What a policy achieved in E whole episodes, in no particular order.

    Attributes:
        returns: float64 ``[E]``, the sum of each episode's rewards.
        lengths: int64 ``[E]``, in frames.
        policy_version: int64 ``[E]``, the version that played the episode.
    """

    returns: torch.Tensor
    lengths: torch.Tensor
    policy_version: torch.Tensor

    @classmethod
    def joined(cls, parts: Sequence[Evaluation]) -> Evaluation:
        """All episodes of ``parts``."""
        return cls(
            torch.cat([part.returns for part in parts]),
            torch.cat([part.lengths for part in parts]),
            torch.cat([part.policy_version for part in parts]),
        )

    @property
    def mean_return(self) -> float:
        """Mean of the returns."""
        return self.returns.mean().item()


@dataclass(frozen=True)
class Frames:
    """Frames of one worker, or of all.

    Attributes:
        stepped: frames that the envs stepped, as far as is known.
        delivered: frames that you got.
        lost: frames that will never be delivered, by cause.
        open: frames that were stepped, and are neither delivered nor lost yet.
        at_most: frames that may have been stepped and lost besides, on hosts that vanished.
    """

    stepped: int = 0
    delivered: int = 0
    lost: Mapping[str, int] = field(default_factory=dict)
    open: int = 0
    at_most: int = 0


@dataclass(frozen=True)
class LedgerReport:
    """What became of all frames; ``str()`` of it is a table.

    Attributes:
        workers: the frames of each worker, by worker_id; all processes that had this id together.
        total: the frames of all workers together.
    """

    workers: Mapping[int, Frames]
    total: Frames

    def __str__(self) -> str:
        causes = sorted(self.total.lost)
        heads = ["worker", "stepped", "delivered", *(f"lost: {cause}" for cause in causes), "open"]
        if self.total.at_most:
            heads.append("at most more")
        rows = [heads]
        named = [*((str(worker_id), f) for worker_id, f in self.workers.items())]
        for name, frames in [*named, ("all", self.total)]:
            numbers = [frames.stepped, frames.delivered, *(frames.lost.get(c, 0) for c in causes)]
            rows.append([name, *(f"{n:,}" for n in [*numbers, frames.open])])
            if self.total.at_most:
                rows[-1].append(f"{frames.at_most:,}")
        return text_table(rows)


class WorkerThroughput(NamedTuple):
    """How fast a worker is.

    Attributes:
        num_rollouts: that it has collected, in all its processes.
        mean_s: seconds from the request for a rollout until it lay ready, on average.
        num_preempted: of the rollouts, those that were ended early for its slowness.
    """

    num_rollouts: int = 0
    mean_s: float = 0.0
    num_preempted: int = 0

    def after(self, took_s: float, *, preempted: bool) -> WorkerThroughput:
        """With one more rollout."""
        count = self.num_rollouts + 1
        mean_s = self.mean_s + (took_s - self.mean_s) / count
        return WorkerThroughput(count, mean_s, self.num_preempted + preempted)


class State(enum.Enum):
    """State of a worker, as the trainer sees it.

    Attributes:
        JOINING: its process is starting, the first one or a replacement.
        READY: it is present.
        SUSPECTED: it has given no sign of life for a while, but still counts as present.
        LOST: it is gone, and won't be replaced.
        LEFT: it was told to leave, and did.
    """

    JOINING = "joining"
    READY = "ready"
    SUSPECTED = "suspected"
    LOST = "lost"
    LEFT = "left"
