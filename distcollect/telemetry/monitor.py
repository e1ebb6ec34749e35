"""A thread that passes snapshots of a running collector to all places that show or write them."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from distcollect.common.refusing import refusing
from distcollect.config import Monitor
from distcollect.results import EvaluationStats, Stats
from distcollect.telemetry.bottleneck import find_bottleneck
from distcollect.telemetry.display import (
    Display,
    NotebookDisplay,
    is_notebook,
    is_terminal,
    log_line,
)
from distcollect.telemetry.exporters import Prometheus, TensorBoard
from distcollect.telemetry.stats_file import STATS_FILE, JsonLines
from distcollect.telemetry.trace import Trace

log = logging.getLogger("distcollect")

VIEW_VARIABLE = "DISTCOLLECT_VIEW"
_WITH_CURVES = JsonLines, TensorBoard
_LOG_EVERY_S = 30.0
_JOIN_TIMEOUT_S = 5.0
_SHUTDOWN_S = 120.0  # longer than the shutdown of a collector takes


class Writer(Protocol):
    """Shows or writes snapshots; called from one thread at a time.

    Attributes:
        about: its name in log messages.
        every_s: seconds between two snapshots.
    """

    about: str
    every_s: float

    def write(self, stats: Stats, /) -> object:
        """Show or write a snapshot; the last one has ``stats.ended``."""

    def close(self) -> None:
        """Release all resources; no more snapshots follow."""


class MonitorThread:
    """The thread of one collector that passes snapshots to writers; without writers, no thread.

    Attributes:
        trace: the trace that spans are written to; None: no trace.
        metrics: names of the metrics of episodes.
    """

    def __init__(
        self, options: Monitor | None, trace: str | os.PathLike[str] | None = None
    ) -> None:
        """Open all writers of ``options``, and a trace in the file ``trace``.

        Raises:
            ArgumentError: a file or a port can't be opened, or a package is missing.
            ArgumentTypeError: ``trace`` is no path.
        """
        options = Monitor() if options is None else options
        self.metrics = tuple(options.metrics)
        self._writers: list[Writer] = []
        self._latest: Callable[[], Stats | None] = lambda: None  # before the first batch
        self._last: Stats | None = None
        self._thread = threading.Thread(target=self._run, name="distcollect-monitor", daemon=True)
        self._lock = threading.Lock()  # held while the thread is started, and told to end
        self._end = threading.Event()
        self._woken = threading.Event()  # set at the end, and for curves
        self._evaluations: deque[EvaluationStats] = deque()  # that curves lack
        self.trace: Trace | None = None
        try:
            self._open(options)
            if trace is not None:  # it may be in the run_dir, which is there now
                self.trace = Trace(trace)
        except BaseException:
            self._drop_all()
            self._close_trace()
            raise

    def _open(self, options: Monitor) -> None:
        add = self._writers.append
        if options.run_dir is not None:
            folder = Path(options.run_dir)
            problem = f"Monitor(run_dir={str(folder)!r}): can't be written to"
            with refusing(problem, "name another folder"):
                folder.mkdir(parents=True, exist_ok=True)
                add(JsonLines(folder / STATS_FILE, options.every_s))
                if options.tensorboard:
                    add(TensorBoard(folder, options.every_s))
        if options.prometheus_port is not None:
            latest = lambda: self._latest()  # noqa: E731, PLW0108 - begin() replaces it
            add(Prometheus(options.prometheus_port, latest))
        if options.callback is not None:
            add(_Callback("Monitor(callback=...)", options.callback, options.every_s))
        if wants_view(options):
            if is_terminal(sys.stderr):
                add(Display())
            elif is_notebook():
                add(NotebookDisplay())
            elif log.isEnabledFor(logging.INFO):
                add(_Callback("the log", lambda s: log.info("%s", log_line(s)), _LOG_EVERY_S))

    def begin(self, latest: Callable[[], Stats | None]) -> None:
        """The first batch is requested. ``latest`` gives snapshots, or None if there are none."""
        with self._lock:
            self._latest = latest
            if self._writers and not self._end.is_set():
                self._thread.start()

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Have each of these numbers plotted at ``step``; snapshots have the last ones."""
        for writer in list(self._writers):
            if isinstance(writer, TensorBoard):
                writer.log(values, step)

    def evaluated(self, evaluation: EvaluationStats) -> None:
        """Have files with curves get this evaluation now: each is a point of its own."""
        if any(isinstance(writer, _WITH_CURVES) for writer in self._writers):
            self._evaluations.append(replace(evaluation, age_s=0.0))
            self._woken.set()

    def close(self, last: Stats | None) -> None:
        """Pass on the last snapshot, if there is one, and end. A second call does nothing."""
        with self._lock:
            if self._end.is_set():
                return
            last = self._last = last or self._last
            self._end.set()
            self._woken.set()
        # This may run on the thread itself: a callback may shut its collector down, and a collector
        # without references may be finalized on any thread.
        if self._thread.ident is None:
            self._drop_all()
        elif self._thread is threading.current_thread():
            self._finish()
        else:
            self._thread.join(_JOIN_TIMEOUT_S)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            log.warning(
                "the last statistics of the run may be missing: a writer hangs for %g s: %s",
                _JOIN_TIMEOUT_S,
                ", ".join(writer.about for writer in self._writers),
            )
        if last is not None and last.delivered:
            log.info("%s", find_bottleneck(last))
        self._close_trace()

    def _close_trace(self) -> None:
        if self.trace is not None:
            self.trace.close()

    # What follows runs on the thread.

    def _run(self) -> None:
        try:
            self._pass_on()
        except Exception:
            log.exception("statistics of the run end here; the run goes on")
        finally:
            self._finish()

    def _pass_on(self) -> None:
        due = {id(writer): time.monotonic() + writer.every_s for writer in self._writers}
        while self._writers:
            pause_s = min(due[id(writer)] for writer in self._writers) - time.monotonic()
            self._woken.wait(min(max(0.0, pause_s), threading.TIMEOUT_MAX))
            self._woken.clear()
            if self._end.is_set():
                return
            points = [self._evaluations.popleft() for _ in range(len(self._evaluations))]
            if points:
                now = time.monotonic()
                due.update((id(w), now) for w in self._writers if isinstance(w, _WITH_CURVES))
            stats = self._latest()
            if stats is None:
                return
            if stats.ended:
                self._end.wait(_SHUTDOWN_S)  # close() passes on the last one, with final counts
                return
            with self._lock:
                if self._end.is_set():
                    return
                self._last = stats
            self._write_points(points, stats)
            for writer in list(self._writers):
                if due[id(writer)] <= time.monotonic() and not self._end.is_set():
                    self._write(writer, stats)
                    due[id(writer)] = time.monotonic() + writer.every_s

    def _finish(self) -> None:
        """Pass on the last snapshot, and close all writers."""
        if self._last is not None:
            self._write_points([*self._evaluations], self._last)
            for writer in list(self._writers):
                self._write(writer, replace(self._last, ended=True))
        self._drop_all()

    def _write_points(self, evaluations: Sequence[EvaluationStats], stats: Stats) -> None:
        """Write snapshots with those of these that are not the newest, which ``stats`` has."""
        newest = replace(stats.evaluation, age_s=0.0)
        for evaluation in [each for each in evaluations if each != newest]:
            for writer in [w for w in self._writers if isinstance(w, _WITH_CURVES)]:
                self._write(writer, replace(stats, evaluation=evaluation))

    def _write(self, writer: Writer, stats: Stats) -> None:
        try:
            writer.write(stats)
        except (Exception, SystemExit):
            # Statistics must never end a run.
            log.exception("%s failed and gets no more statistics; the run goes on", writer.about)
            self._drop(writer)

    def _drop_all(self) -> None:
        for writer in list(self._writers):
            self._drop(writer)

    def _drop(self, writer: Writer) -> None:
        if writer not in self._writers:
            return  # a callback shut the collector down, and then raised
        self._writers.remove(writer)
        try:
            writer.close()
        except Exception:
            # For example because the terminal is gone.
            log.debug("closing %s failed", writer.about, exc_info=True)


def wants_view(options: Monitor) -> bool:
    """Whether to show the run on the terminal or in the log."""
    if options.view is not None:
        return options.view
    return os.environ.get(VIEW_VARIABLE, "1").lower() not in ("0", "off", "false", "no")


@dataclass
class _Callback:
    """Calls a function with each snapshot."""

    about: str
    write: Callable[[Stats], object]
    every_s: float

    def close(self) -> None:
        """Nothing to do."""
