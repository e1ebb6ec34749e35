"""What a collector has done so far: a snapshot, and what a worker's process tells of itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Work(NamedTuple):
    """What a process has done since its first rollout; all but the episodes in nanoseconds.

    Attributes:
        busy_ns: collecting; the next three are parts of it.
        env_ns: stepping and resetting envs.
        policy_ns: choosing actions.
        swap_ns: swapping weights in.
        wait_ns: between two rollouts, for a request.
        cpu_ns: of CPU that the thread that steps has used while it collected.
        returns: of the episodes that ended in the last rollout.
        lengths: theirs, in frames.
    """

    busy_ns: int = 0
    env_ns: int = 0
    policy_ns: int = 0
    swap_ns: int = 0
    wait_ns: int = 0
    cpu_ns: int = 0
    returns: tuple[float, ...] = ()
    lengths: tuple[int, ...] = ()


NO_WORK = Work()


@dataclass(frozen=True)
class WorkerTimes:
    """How one worker, or all together, spent their time, as shares of it.

    All but the last add up to 1, once there is anything to tell; before, all are 0.

    Attributes:
        env: stepping and resetting envs.
        policy: choosing actions.
        swap: swapping new weights in.
        other: writing frames down and the like.
        wait: between two rollouts, for a request.
        transfer: meanwhile, a rollout was on its way to the trainer.
        cpu: share of the time spent collecting in which the thread that steps used a CPU: low if
            envs sleep or wait, or others take the CPU.
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
        train: between two batches: your code; or in the background, a rate limit or a pause.
        collect: waiting for rollouts that are being collected; where the collector steps the envs
            itself, doing that.
        weights: packing and sending weights, and waiting until workers have them.
        transfer: waiting for rollouts that lie ready to get here.
        assemble: making batches of them.
    """

    train: float = 0.0
    collect: float = 0.0
    weights: float = 0.0
    transfer: float = 0.0
    assemble: float = 0.0


@dataclass(frozen=True)
class Lags:
    """How old the policy of delivered frames was.

    Attributes:
        frames: lag, in versions, to how many delivered frames have it; by rising lag.
    """

    frames: Mapping[int, int] = field(default_factory=dict)

    @property
    def mean(self) -> float:
        """0.0 if there are no frames."""
        return sum(lag * n for lag, n in self.frames.items()) / max(1, sum(self.frames.values()))

    @property
    def max(self) -> int:
        """0 if there are no frames."""
        return max(self.frames, default=0)

    def quantile(self, share: float) -> int:
        """At least this share of all frames, 0 to 1, has no higher lag."""
        missing = share * sum(self.frames.values())
        for lag, count in self.frames.items():
            missing -= count
            if missing <= 0:
                return lag
        return self.max


@dataclass(frozen=True)
class EpisodeStats:
    """Episodes that ended: the env said so, or ``max_frames_per_traj`` did.

    Attributes:
        count: all of them.
        mean_return: sum of rewards, on average over the last hundred of the run; NaN before the
            first.
        mean_length: frames, likewise.
        min_return: the lowest of these hundred.
        max_return: the highest.
    """

    count: int = 0
    mean_return: float = math.nan
    mean_length: float = math.nan
    min_return: float = math.nan
    max_return: float = math.nan


@dataclass(frozen=True)
class WorkerStats:
    """Of one worker; of all processes that were in its slot.

    Attributes:
        state: "joining", "ready", "suspected", "lost" or "left".
        frames: delivered.
        frames_per_s: lately, see :class:`Stats`.
        mean_frames_per_s: since the first batch was asked for.
        lag: of its delivered frames.
        times: how it spent its time.
        num_bytes: of its rollouts that came here.
        num_ready: rollouts of it that lie ready, there or here.
        num_restarts: how often its process was replaced.
        num_env_faults: how often an env raised in the present process.
        num_episodes: that ended.
        lost: frames that it stepped and that are not delivered, by cause.
        may_be_lost: so many more, at most, where its host vanished with the count.
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
    """What a collector has done so far.

    Attributes:
        collector: name of its class.
        elapsed_s: since the first batch was asked for.
        frames: collected, with padding, and those of runs that it goes on from.
        resumed_frames: of these, those of runs that it goes on from.
        total_frames: frames until it ends; -1: endless.
        delivered: real frames that this collector delivered, or handed over to another trainer.
        frames_per_s: lately: over ten seconds, or over the last batch if that took longer.
        mean_frames_per_s: over ``elapsed_s``.
        policy_version: of the newest published weights.
        lag: of the delivered frames.
        episodes: that ended.
        trainer: how the thread that takes batches spent its time.
        times: how the workers spent theirs, all together.
        num_bytes: of rollouts that came here from workers.
        num_ready: rollouts that lie ready, there or here.
        mean_ready: the same, on average when a batch was asked for.
        num_restarts: how often worker processes were replaced.
        lost: frames that were stepped and not delivered, by cause.
        may_be_lost: so many more, at most, on hosts that vanished.
        sync: whether a batch is collected when it is asked for.
        in_process: whether the collector steps its envs itself.
        num_cores: of this host, if all workers are here; else 0.
        ended: it was shut down.
        workers: by worker_id.
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
        """Seconds until ``total_frames`` at the rate of late; None if nobody can say."""
        if self.total_frames == -1 or not self.frames_per_s:
            return None
        collected = self.frames - self.resumed_frames
        # Padding counts towards the total, and not for the rate.
        real = min(1.0, self.delivered / collected) if self.delivered and collected else 1.0
        return max(0, self.total_frames - self.frames) * real / self.frames_per_s

    def as_dict(self) -> dict[str, Any]:
        """Numbers, texts and dicts of these by name, as JSON can hold them."""
        plain: dict[str, Any] = _plain(self)
        return plain

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Stats:
        """From :meth:`as_dict`, also of a version that told more, or less."""
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
