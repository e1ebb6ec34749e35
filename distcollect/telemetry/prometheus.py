"""Statistics for Prometheus."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from distcollect.errors import ArgumentError
from distcollect.results import Stats, WorkerStats

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

log = logging.getLogger("distcollect")

_JOIN_TIMEOUT_S = 5.0
_COUNTERS = {
    *("frames", "episodes", "bytes", "restarts", "env_faults", "lost_frames", "policy_version")
}
_OF_WORKERS: dict[str, Callable[[WorkerStats], float]] = {
    "frames": lambda worker: worker.frames,
    "frames_per_s": lambda worker: worker.frames_per_s,
    "lag_mean": lambda worker: worker.lag.mean,
    "restarts": lambda worker: worker.num_restarts,
    "env_faults": lambda worker: worker.num_env_faults,
    "up": lambda worker: worker.state == "ready",
    "share_wait": lambda worker: worker.times.wait,
}


def open_prometheus(port: int, latest: Callable[[], Stats | None]) -> Prometheus:
    """Serve metrics at ``port``.

    Raises:
        ArgumentError: the port is taken, or prometheus_client is not installed.
    """
    try:
        return Prometheus(port, latest)
    except ImportError as error:
        raise ArgumentError(
            f"Monitor(prometheus_port={port}): {error}; install it with "
            "pip install 'distcollect[prometheus]'"
        ) from error
    except OSError as error:
        raise ArgumentError(
            f"Monitor(prometheus_port={port}): can't listen there ({error.strerror}); name "
            "another port, or 0 for any that is free"
        ) from error


def figures(stats: Stats) -> dict[str, float]:
    """The numbers of a snapshot that are plotted over time; unknown ones are left out."""
    values: dict[str, float] = {
        "frames": stats.frames,
        "frames_per_s": stats.frames_per_s,
        "policy_version": stats.policy_version,
        "lag_mean": stats.lag.mean,
        "lag_max": stats.lag.max,
        "episodes": stats.episodes.count,
        "episode_return": stats.episodes.mean_return,
        "episode_length": stats.episodes.mean_length,
        "evaluation_return": stats.evaluation.mean_return,
        "evaluation_length": stats.evaluation.mean_length,
        "bytes": stats.num_bytes,
        "ready_rollouts": stats.num_ready,
        "restarts": stats.num_restarts,
        "env_faults": stats.num_env_faults,
        "lost_frames": sum(stats.lost.values()),
    }
    if not stats.ended:  # at the end all workers have left: that is no loss
        values["workers"] = sum(w.state == "ready" for w in stats.workers.values())
    for who, times in (("trainer", stats.trainer), ("worker", stats.times)):
        values.update((f"{who}_share_{name}", value) for name, value in vars(times).items())
    return dict(_known(values))


def _known(values: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    return ((name, value) for name, value in values.items() if not math.isnan(value))


class StatsCollector:
    """Turns the newest snapshot into metrics whenever a registry asks for them."""

    def __init__(self, latest: Callable[[], Stats | None]) -> None:
        """``latest`` gives the newest snapshot, or None if there is none yet."""
        self._latest = latest

    def collect(self) -> Iterator[Metric]:
        """All metrics; none before the first batch was asked for."""
        from prometheus_client import metrics_core as core  # noqa: PLC0415 - an extra

        families: dict[str, Any] = {}

        def add(name: str, value: float, **labels: str) -> None:
            if name not in families:
                is_counter = name.removeprefix("worker_") in _COUNTERS
                kind: Any = core.CounterMetricFamily if is_counter else core.GaugeMetricFamily
                families[name] = kind(f"distcollect_{name}", "", labels=list(labels))
            families[name].add_metric(list(labels.values()), value)

        stats = self._latest()
        if stats is None:
            return
        for name, value in figures(stats).items():
            add(name, value)
        for metric, value in _known(stats.episodes.metrics):
            add("episode_metric", value, metric=metric)
        for metric, value in _known(stats.evaluation.metrics):
            add("evaluation_metric", value, metric=metric)
        for worker_id, worker in stats.workers.items():
            for name, of in _OF_WORKERS.items():
                add(f"worker_{name}", of(worker), worker=str(worker_id))
            for metric, value in _known(worker.metrics):
                add("worker_episode_metric", value, worker=str(worker_id), metric=metric)
        yield from families.values()


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
            ImportError: prometheus_client is not installed.
            OSError: the port is taken.
        """
        from prometheus_client import CollectorRegistry, start_http_server  # noqa: PLC0415

        # Not the default registry, which has metrics of the user's process.
        registry = CollectorRegistry()
        registry.register(StatsCollector(latest))
        self._server, self._thread = start_http_server(port, "127.0.0.1", registry)
        serve_metrics: Any = self._server.get_app()

        def serve(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
            if environ["PATH_INFO"] != "/metrics":
                start_response("404 Not Found", [])
                return []
            if latest() is None:
                start_response("503 Service Unavailable", [("Content-Type", "text/plain")])
                return [b"no batch was asked for yet\n"]
            body: Iterable[bytes] = serve_metrics(environ, start_response)
            return body

        self._server.set_app(serve)
        handler: Any = self._server.RequestHandlerClass
        # A client that connects and sends nothing is dropped after this many seconds.
        self._server.RequestHandlerClass = type("Handler", (handler,), {"timeout": 5.0})
        self.port: int = self._server.server_address[1]
        log.info("metrics for Prometheus: http://127.0.0.1:%d/metrics", self.port)

    def write(self, stats: Stats) -> None:
        """Nothing to do: see :attr:`every_s`."""

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_JOIN_TIMEOUT_S)
