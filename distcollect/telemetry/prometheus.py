"""Statistics for Prometheus."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from distcollect.errors import ArgumentError
from distcollect.results import Stats

log = logging.getLogger("distcollect")

_JOIN_TIMEOUT_S = 5.0


def open_prometheus(port: int, latest: Callable[[], Stats | None]) -> Prometheus:
    """Serve metrics at ``port``.

    Raises:
        ArgumentError: the port is taken.
    """
    try:
        return Prometheus(port, latest)
    except OSError as error:
        raise ArgumentError(
            f"Monitor(prometheus_port={port}): can't be listened on ({error.strerror}); name "
            "another port, or 0 for any that is free"
        ) from error


def figures(stats: Stats) -> dict[str, float]:
    """The numbers of a snapshot that are drawn over time; those that are unknown left out."""
    values: dict[str, float] = {
        "frames": stats.frames,
        "frames_per_s": stats.frames_per_s,
        "policy_version": stats.policy_version,
        "lag_mean": stats.lag.mean,
        "lag_max": stats.lag.max,
        "episodes": stats.episodes.count,
        "episode_return": stats.episodes.mean_return,
        "episode_length": stats.episodes.mean_length,
        "bytes": stats.num_bytes,
        "ready_rollouts": stats.num_ready,
        "restarts": stats.num_restarts,
        "lost_frames": sum(stats.lost.values()),
    }
    if not stats.ended:  # all have left then, which is no news
        values["workers"] = sum(w.state == "ready" for w in stats.workers.values())
    for who, times in (("trainer", stats.trainer), ("worker", stats.times)):
        values.update((f"{who}_share_{name}", value) for name, value in vars(times).items())
    return {name: value for name, value in values.items() if value == value}  # noqa: PLR0124 - NaN


def exposition(stats: Stats) -> str:
    """A snapshot in Prometheus's text format."""
    counters = {"frames", "episodes", "bytes", "restarts", "lost_frames", "policy_version"}
    lines: list[str] = []
    for name, value in figures(stats).items():
        metric = f"distcollect_{name}" + ("_total" if name in counters else "")
        lines += [f"# TYPE {metric} {'counter' if name in counters else 'gauge'}"]
        lines += [f"{metric} {value:.17g}"]
    of_workers: dict[str, Callable[[Any], float]] = {
        "frames_total": lambda w: w.frames,
        "frames_per_s": lambda w: w.frames_per_s,
        "lag_mean": lambda w: w.lag.mean,
        "restarts_total": lambda w: w.num_restarts,
        "up": lambda w: w.state == "ready",
        "share_wait": lambda w: w.times.wait,
    }
    for name, of in of_workers.items():
        metric = f"distcollect_worker_{name}"
        lines.append(f"# TYPE {metric} {'counter' if name.endswith('_total') else 'gauge'}")
        lines += [f'{metric}{{worker="{w}"}} {of(s):.17g}' for w, s in stats.workers.items()]
    return "\n".join(lines) + "\n"


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        """Whoever asked has gone away meanwhile: that is no news either."""
        log.debug("a request for metrics failed", exc_info=True)


class Prometheus:
    """Serves the newest snapshot on 127.0.0.1, to whoever asks for ``/metrics``.

    Attributes:
        port: where.
    """

    about = "Monitor(prometheus_port=...)"
    every_s = 3600.0  # it asks for them itself

    def __init__(self, port: int, latest: Callable[[], Stats | None]) -> None:
        """Listen at ``port``; 0: a free one. Raises OSError if it is taken."""

        class Handler(BaseHTTPRequestHandler):
            timeout = 5.0

            def do_GET(self) -> None:
                if self.path.partition("?")[0] != "/metrics":
                    self.send_error(404)
                    return
                stats = latest()
                if stats is None:
                    self.send_error(503, "no batch was asked for yet")
                    return
                body = exposition(stats).encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                """Nothing: a scrape is no news."""

        self._server = _Server(("127.0.0.1", port), Handler)
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="distcollect-prometheus", daemon=True
        )
        self._thread.start()
        log.info("metrics for Prometheus: http://127.0.0.1:%d/metrics", self.port)

    def write(self, stats: Stats) -> None:
        """Nothing to do: see :attr:`every_s`."""

    def close(self) -> None:
        """Listen no more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_JOIN_TIMEOUT_S)
