"""Statistics for Prometheus and TensorBoard."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from distcollect.common.checks import refusing
from distcollect.results import Stats, WorkerStats

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

log = logging.getLogger("distcollect")

_JOIN_TIMEOUT_S = 5.0
# Figures of the whole run, with their descriptions. Those that only rise are counters.
_COUNTERS: dict[str, tuple[str, Callable[[Stats], float]]] = {
    "frames": ("Frames delivered", lambda s: s.frames),
    "policy_version": ("Number of times that weights were published", lambda s: s.policy_version),
    "episodes": ("Episodes that have ended", lambda s: s.episodes.count),
    "bytes": ("Bytes of the rollouts that were fetched", lambda s: s.num_bytes),
    "restarts": ("Worker processes that were replaced", lambda s: s.num_restarts),
    "env_faults": ("How often an env raised", lambda s: s.num_env_faults),
    "lost_frames": ("Frames that were stepped and not delivered", lambda s: sum(s.lost.values())),
}
_GAUGES: dict[str, tuple[str, Callable[[Stats], float]]] = {
    "frames_per_s": ("Recent frames per second", lambda s: s.frames_per_s),
    "lag_mean": ("Mean policy lag of delivered frames, in versions", lambda s: s.lag.mean),
    "lag_max": ("Highest policy lag of delivered frames", lambda s: s.lag.max),
    "episode_return": ("Mean return of the last episodes", lambda s: s.episodes.mean_return),
    "episode_length": ("Mean length of the last episodes", lambda s: s.episodes.mean_length),
    "evaluation_return": ("Mean return, last evaluation", lambda s: s.evaluation.mean_return),
    "evaluation_length": ("Mean length, last evaluation", lambda s: s.evaluation.mean_length),
    "ready_rollouts": ("Rollouts that are ready", lambda s: s.num_ready),
    # At the end all workers have left: that is no loss.
    "workers": (
        "Workers that are ready",
        lambda s: math.nan if s.ended else sum(w.state == "ready" for w in s.workers.values()),
    ),
}
_OF_WORKERS: dict[str, tuple[str, Callable[[WorkerStats], float]]] = {
    "frames": ("Frames delivered", lambda w: w.frames),
    "frames_per_s": ("Recent frames per second", lambda w: w.frames_per_s),
    "lag_mean": ("Mean policy lag of delivered frames, in versions", lambda w: w.lag.mean),
    "restarts": ("How often its process was replaced", lambda w: w.num_restarts),
    "env_faults": ("How often an env raised", lambda w: w.num_env_faults),
    "up": ("1 if it is ready", lambda w: w.state == "ready"),
}


def figures(stats: Stats) -> dict[str, float]:
    """The numbers of a snapshot that are plotted over time; unknown ones are left out."""
    values = {name: of(stats) for name, (_, of) in {**_COUNTERS, **_GAUGES}.items()}
    for who, times in (("trainer", stats.trainer), ("worker", stats.times)):
        values.update((f"{who}_share_{name}", value) for name, value in vars(times).items())
    return {name: value for name, value in values.items() if not math.isnan(value)}


# Of a metric: its name and description, and pairs of labels and values.
_Family: TypeAlias = tuple[str, str, list[tuple[dict[str, str], float]]]


def _families(stats: Stats) -> Iterator[_Family]:
    """Make all metrics of a snapshot."""
    workers = {str(worker_id): worker for worker_id, worker in stats.workers.items()}

    def of_workers(label: str, parts: Callable[[WorkerStats], Mapping[str, float]]) -> Any:
        return [
            ({"worker": w, label: name}, value)
            for w, worker in workers.items()
            for name, value in parts(worker).items()
        ]

    for name, (about, of) in {**_COUNTERS, **_GAUGES}.items():
        yield name, about, [({}, of(stats))]
    for name, (about, of_worker) in _OF_WORKERS.items():
        values = [({"worker": w}, of_worker(each)) for w, each in workers.items()]
        yield f"worker_{name}", f"{about}, by worker", values
    about = "Mean of a metric over the last episodes"
    for name, episodes in (("episode", stats.episodes), ("evaluation", stats.evaluation)):
        means = [({"metric": metric}, value) for metric, value in episodes.metrics.items()]
        yield f"{name}_metric", about, means
    yield "worker_episode_metric", f"{about}, by worker", of_workers("metric", lambda w: w.metrics)
    shares = [({"activity": name}, value) for name, value in vars(stats.trainer).items()]
    yield "trainer_share", "Share of the time of the trainer's thread, by what it did", shares
    about = "Share of a worker's time, by what it did"
    yield "worker_share", about, of_workers("activity", lambda worker: vars(worker.times))


class StatsCollector:
    """Turns the newest snapshot into metrics whenever a registry asks for them."""

    def __init__(self, latest: Callable[[], Stats | None]) -> None:
        """``latest`` gives the newest snapshot, or None if there is none yet."""
        self._latest = latest

    def collect(self) -> Iterator[Metric]:
        """All metrics; none before the first batch was asked for. Unknown values are left out."""
        from prometheus_client import metrics_core as core  # noqa: PLC0415 - an extra

        stats = self._latest()
        for name, about, samples in () if stats is None else _families(stats):
            is_counter = name.removeprefix("worker_") in _COUNTERS
            kind: Any = core.CounterMetricFamily if is_counter else core.GaugeMetricFamily
            known = [(labels, value) for labels, value in samples if not math.isnan(value)]
            made = kind(f"distcollect_{name}", about, labels=list(known[0][0]) if known else ())
            for labels, value in known:
                made.add_metric(list(labels.values()), value)
            yield made


class Prometheus:
    """Serves the newest snapshot under ``/metrics`` on 127.0.0.1.

    Attributes:
        port: the port it listens on.
    """

    about = "Monitor(prometheus_port=...)"
    every_s = 3600.0  # a request fetches the newest snapshot itself

    def __init__(self, port: int, latest: Callable[[], Stats | None]) -> None:
        """Listen at ``port``; 0: any that is free.

        Raises:
            ArgumentError: the port is taken, or prometheus_client is not installed.
        """
        given = f"Monitor(prometheus_port={port})"
        remedy = "install it with pip install 'distcollect[prometheus]'"
        with refusing(f"{given} lacks a package", remedy, ImportError):
            from prometheus_client import CollectorRegistry, start_http_server  # noqa: PLC0415
        # Not the default registry, which has metrics of the user's process.
        registry = CollectorRegistry()
        registry.register(StatsCollector(latest))
        remedy = "name another port, or 0 for any that is free"
        with refusing(f"{given}: can't listen there", remedy):
            self._server, self._thread = start_http_server(port, "127.0.0.1", registry)
        self.port: int = self._server.server_address[1]
        log.info("metrics for Prometheus: http://127.0.0.1:%d/metrics", self.port)

    def write(self, stats: Stats) -> None:
        """Nothing to do: see :attr:`every_s`."""

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_JOIN_TIMEOUT_S)


class TensorBoard:
    """Writes scalars for TensorBoard; their step is the number of frames."""

    about = "Monitor(tensorboard=True)"

    def __init__(self, folder: Path, every_s: float) -> None:
        """Write events to ``folder``.

        Raises:
            ArgumentError: tensorboard is not installed.
        """
        remedy = "install it with pip install 'distcollect[tensorboard]'"
        with refusing("Monitor(tensorboard=True) lacks a package", remedy, ImportError):
            from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - an extra
        self.every_s = every_s
        self._events: Any = SummaryWriter(str(folder))

    def write(self, stats: Stats) -> None:
        """Write all figures that change with time, but none of single workers."""
        for name, value in figures(stats).items():
            # TensorBoard groups by the part before "/": "trainer_share/train".
            group, share, part = name.partition("_share_")
            tag = f"{group}_share/{part}" if share else f"collector/{name}"
            self._events.add_scalar(tag, value, stats.frames)
        of = {"metrics": stats.episodes, "evaluation_metrics": stats.evaluation}
        for group, episodes in of.items():
            for name, value in episodes.metrics.items():
                if not math.isnan(value):
                    self._events.add_scalar(f"{group}/{name}", value, stats.frames)
        self._events.flush()

    def close(self) -> None:
        """Close the file."""
        self._events.close()
