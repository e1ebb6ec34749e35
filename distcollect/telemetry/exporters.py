"""Statistics for Prometheus and TensorBoard."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distcollect.common.refusing import refusing
from distcollect.results import Stats
from distcollect.telemetry.figures import FIGURES, RUN, WORKER

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

log = logging.getLogger("distcollect")

_JOIN_TIMEOUT_S = 5.0
_REQUEST_S = 5.0  # for each read and write of a connection


class StatsCollector:
    """Turns the newest snapshot into metrics whenever a registry asks for them."""

    def __init__(self, latest: Callable[[], Stats | None]) -> None:
        """``latest`` gives the newest snapshot, or None if there is none yet."""
        self._latest = latest

    def collect(self) -> Iterator[Metric]:
        """All metrics; none before the first batch was asked for. Unknown values are left out."""
        from prometheus_client import metrics_core as core  # noqa: PLC0415 - an extra

        stats = self._latest()
        if stats is None:
            return
        workers = {str(worker_id): worker for worker_id, worker in stats.workers.items()}
        for figure in FIGURES:
            kind: Any = core.CounterMetricFamily if figure.rises else core.GaugeMetricFamily
            label = [figure.label] if figure.label else []
            if RUN in figure.of:
                made = kind(f"distcollect_{figure.name}", figure.help, labels=label)
                for name, value in figure.values(stats).items():
                    made.add_metric([name] if label else [], value)
                yield made
            if WORKER in figure.of:
                about = f"{figure.help}, by worker"
                made = kind(f"distcollect_worker_{figure.name}", about, labels=["worker", *label])
                for worker_id, worker in workers.items():
                    for name, value in figure.values(worker).items():
                        made.add_metric([worker_id, name] if label else [worker_id], value)
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
        # Each connection has a thread, which else waits for ever for one who sends no request.
        handler: Any = self._server.RequestHandlerClass
        self._server.RequestHandlerClass = type("Handler", (handler,), {"timeout": _REQUEST_S})
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]
        self.port: int = self._server.server_address[1]
        log.info("metrics for Prometheus: http://127.0.0.1:%d/metrics", self.port)

    def write(self, stats: Stats) -> None:
        """Nothing to do: see :attr:`every_s`."""

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_JOIN_TIMEOUT_S)


def scalars(stats: Stats) -> dict[str, float]:
    """The figures of a snapshot that are plotted over frames, by tag; unknown ones are left out.

    Without those of :meth:`.DataCollectorBase.log`, which are plotted when they are logged.
    """
    return {
        f"{figure.tag}/{label or figure.name}": value
        for figure in FIGURES
        if RUN in figure.of and figure.tag
        for label, value in figure.values(stats).items()
    }


class TensorBoard:
    """Writes scalars for TensorBoard; the step of a figure is the number of frames."""

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
        self._logged: deque[tuple[Mapping[str, float], int]] = deque()

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Keep scalars for the next :meth:`write`; from any thread."""
        self._logged.append((values, step))

    def write(self, stats: Stats) -> None:
        """Write what was logged, and the figures that change with time, none of single workers."""
        self._write_logged()
        for tag, value in scalars(stats).items():
            self._events.add_scalar(tag, value, stats.frames)
        self._events.flush()

    def _write_logged(self) -> None:
        while self._logged:
            values, step = self._logged.popleft()
            for tag, value in values.items():
                self._events.add_scalar(tag, value, step)

    def close(self) -> None:
        """Close the file."""
        self._write_logged()
        self._events.close()
