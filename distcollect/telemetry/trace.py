"""A trace: what every process did and when, in one file for a timeline viewer.

The file is a JSON array of Chrome's trace events, which ui.perfetto.dev and chrome://tracing load.
Workers record spans by their own clocks and send them with rollouts. The offset of a worker's clock
follows from each rollout alone: it began after its request was sent, and ended before its header
arrived. The answer takes less time than the request, which may wait for the rollout before: so a
rollout from a host with another clock ends when its header arrives, and has the offset and the
largest possible error among its arguments.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from distcollect.common.refusing import refusing
from distcollect.common.threads import SerialThread
from distcollect.errors import ArgumentTypeError
from distcollect.rollout.header import Span

log = logging.getLogger(__name__)

# The thread of a worker whose spans lie between a request and its answer.
STEPS = "steps"
WEIGHTS = "weights"
BATCHES = "batches"
# The name of a worker's span for a whole rollout.
ROLLOUT = "rollout"

# Some 100 bytes each. With more, viewers become slow.
MAX_EVENTS = 1_000_000
# Times are multiples of this. Viewers compute in floating point, where an eighth of a microsecond
# is exact. With rounding errors a span could overlap the next one, and viewers drop such spans.
_TICK_NS = 125
_TICKS_PER_US = 8
_JOIN_TIMEOUT_S = 10.0
_NOTHING: Mapping[str, Any] = {}
# Processes are known by worker_id and incarnation.
_TRAINER = -1, 0
_FULL = "the trace is full: nothing was recorded from here on"


class PushTimes(NamedTuple):
    """When a version of the weights was sent, in nanoseconds of the trainer's clock.

    Attributes:
        version: its policy_version.
        begin_ns: the push began.
        ready_ns: all receivers were ready.
        sent_ns: the payload was sent.
        end_ns: the receivers had acknowledged, or were too late.
    """

    version: int
    begin_ns: int
    ready_ns: int
    sent_ns: int
    end_ns: int


class Trace:
    """Writes one file, on a thread of its own; every method may be called from any thread.

    After :meth:`close` the file is a complete JSON array. If the process is killed, the end of the
    array is missing, which viewers accept, and the newest events.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        max_events: int = MAX_EVENTS,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        """Make the file, or overwrite it.

        Args:
            path: path of the file.
            max_events: the trace ends after so many events, and its last event says so.
            clock: clock of this process, in nanoseconds.

        Raises:
            ArgumentError: the file can't be written.
            ArgumentTypeError: ``path`` is no path.
        """
        if not isinstance(path, str | os.PathLike):
            raise ArgumentTypeError(f"trace={path!r}: must be the path of a file")
        remedy = "name a file in a folder that exists and that you may write to"
        with refusing(f"trace={str(path)!r} can't be written", remedy):
            self._file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115 - see _end
        self._path = path
        self._left = max_events
        self._closed = False
        # Reentrant: garbage collection while it is held may close a collector.
        self._lock = threading.RLock()
        self._origin = clock()
        self._newest_us = 0.0
        self._pids: dict[tuple[int, int], int] = {}
        self._tids: dict[tuple[tuple[int, int], str], int] = {}
        self._received_until: dict[tuple[int, int], int] = {}
        self._num_fetches = 0
        self._separator = "[\n"  # before the next event: a comma must not follow the last one
        self._thread = SerialThread("distcollect-trace")
        self._ended: futures.Future[None] = futures.Future()
        self._ids(_TRAINER, BATCHES)

    # What is recorded. Times are nanoseconds of this process's clock.

    def activity(self, activity: str, begin: int, end: int) -> None:
        """The thread that takes batches did this."""
        with self._lock:
            self._spans(_TRAINER, [(BATCHES, activity, begin, end)])

    def rollout(
        self, process: tuple[int, int] | None, spans: Sequence[Span], request: int, heard: int
    ) -> None:
        """A rollout is ready.

        Args:
            process: worker_id and incarnation; None: it was collected in this process.
            spans: by the clock of the process.
            request: when the worker was asked for it.
            heard: when its header arrived.
        """
        with self._lock:
            if process is None:
                self._spans(_TRAINER, spans)
                return
            asking = f"ask worker {process[0]}"  # there is one request to a worker at a time
            self._spans(_TRAINER, [(asking, ROLLOUT, request, heard)])
            ours = [span for span in spans if span[0] == STEPS]
            if not ours:
                return
            least = request - min(begin for _, _, begin, _ in ours)
            most = heard - max(end for _, _, _, end in ours)
            # Processes of one host have the same clock.
            offset = 0 if least <= 0 <= most else most
            # Viewers drop a span that overlaps another one of its thread, which could happen when
            # the offset changes.
            earliest = {STEPS: request, WEIGHTS: self._received_until.get(process, 0)}
            placed: list[Span] = []
            for thread, name, begin, end in spans:
                first = min(max(begin + offset, earliest[thread]), heard)
                last = min(max(end + offset, earliest[thread]), heard)
                placed.append((thread, name, first, last))
                if thread == WEIGHTS:
                    earliest[WEIGHTS] = last
            self._received_until[process] = earliest[WEIGHTS]
            about = {"clock_ahead_s": -offset / 1e9, "error_s": (most - least) / 1e9}
            self._spans(process, placed, {ROLLOUT: about} if offset else {})

    def fetched(self, worker_id: int, begin: int, end: int) -> None:
        """A rollout was fetched."""
        with self._lock:
            self._num_fetches += 1
            about = {
                "cat": "fetch",
                "name": f"fetch from worker {worker_id}",
                **self._ids(_TRAINER, BATCHES),
                # Otherwise viewers show it outside of all processes.
                "id2": {"local": hex(self._num_fetches)},
            }
            # Begin and end events: two fetches from one worker may overlap.
            self._put(
                [{"ph": ph, **about, "ts": self._us(at)} for ph, at in (("b", begin), ("e", end))]
            )

    def pushed(self, push: PushTimes) -> None:
        """Weights were sent."""
        with self._lock:
            steps = (
                (f"push version {push.version}", push.begin_ns, push.end_ns),
                ("ready", push.begin_ns, push.ready_ns),
                ("send", push.ready_ns, push.sent_ns),
                ("acknowledge", push.sent_ns, push.end_ns),
            )
            self._spans(_TRAINER, [(WEIGHTS, *step) for step in steps])

    def close(self) -> None:
        """Write what is left, and end the array. A second call does nothing."""
        with self._lock:
            if not self._closed:
                self._end("end of the trace")
        # A collector without references may be finalized on that very thread.
        if not self._thread.is_current:
            futures.wait([self._ended], _JOIN_TIMEOUT_S)

    # Events.

    def _spans(
        self, process: tuple[int, int], spans: Sequence[Span], about: Mapping[str, Any] = _NOTHING
    ) -> None:
        """Write spans; ``about`` maps a span's name to its arguments."""
        self._put(
            [
                {
                    "ph": "X",
                    "name": name,
                    **self._ids(process, thread),
                    "ts": (begin_us := self._us(begin)),
                    "dur": self._us(end) - begin_us,
                    **({"args": about[name]} if name in about else {}),
                }
                for thread, name, begin, end in spans
            ]
        )

    def _us(self, at: int) -> float:
        """Microseconds since the begin of the trace, so small that floats hold them exactly."""
        us = max(0, at - self._origin) // _TICK_NS / _TICKS_PER_US
        self._newest_us = max(self._newest_us, us)
        return us

    def _ids(self, process: tuple[int, int], thread: str) -> dict[str, int]:
        """Return the ids of a process and a thread, all different; those of hosts may be equal."""
        key = process, thread
        if key not in self._tids:
            tid = self._tids[key] = len(self._tids) + 1
            pid = self._pids.setdefault(process, tid)
            about: list[tuple[str, dict[str, Any]]] = [("thread_name", {"name": thread})]
            if pid == tid:
                worker_id, incarnation = process
                name = "trainer" if process == _TRAINER else f"worker {worker_id}"
                name += f", incarnation {incarnation}" if incarnation else ""
                about.append(("process_name", {"name": name}))
                about.append(("process_sort_index", {"sort_index": 1 + worker_id}))
            self._put([{"ph": "M", "name": n, "pid": pid, "tid": tid, "args": a} for n, a in about])
        return {"pid": self._pids[process], "tid": self._tids[key]}

    def _put(self, events: list[dict[str, Any]]) -> None:
        if self._closed or not events:
            return
        self._left -= len(events)
        if self._left < 0:
            self._end(_FULL)
        else:
            self._thread.put(partial(self._write, events))

    def _end(self, reason: str) -> None:
        self._closed = True
        about = {"ph": "i", "s": "g", "name": reason, **self._ids(_TRAINER, BATCHES)}
        self._thread.put(partial(self._write, [{**about, "ts": self._newest_us}], "\n]\n"))
        self._ended = self._thread.submit(self._file.close)
        self._thread.close()
        if reason == _FULL:
            log.warning("the trace %s is full, and ends here; the run goes on", self._path)

    def _write(self, events: list[dict[str, Any]], rest: str = "") -> None:
        """Write events, on the thread."""
        if self._file.closed:
            return
        lines = (json.dumps(event, separators=(",", ":")) for event in events)
        try:
            self._file.write(self._separator + ",\n".join(lines) + rest)
            self._file.flush()
        except OSError:
            # A trace must never end a run.
            log.exception("the trace %s ends here; the run goes on", self._path)
            with contextlib.suppress(OSError):
                self._file.close()
        self._separator = ",\n"
