"""A trace: what every process did and when, in one file for a timeline viewer.

The file is a JSON array of Chrome's trace events, which ui.perfetto.dev and chrome://tracing load.
Workers record spans by their own clocks and send them with rollouts. The offset of a worker's clock
follows from the rollouts alone: each began after its request was sent, and ended before its header
arrived. The error is half the sum of the shortest request and the shortest answer so far. In the
trace, rollouts from a host with another clock have the offset and the error among their arguments.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from distcollect.errors import ArgumentError, ArgumentTypeError
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
# Events that arrive within this time are written together.
_GATHER_S = 0.2
_JOIN_TIMEOUT_S = 10.0
_NOTHING: Mapping[str, Any] = {}
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


class ClockOffset:
    """The offset between the clock of another process and this one's.

    The offset fits all rollouts so far. When clocks have drifted so far that none does, it starts
    again with the newest rollout.
    """

    def __init__(self) -> None:
        self._lowest: int | None = None
        self._highest: int | None = None

    def narrow(self, asked_ns: int, begun_ns: int, ended_ns: int, heard_ns: int) -> int:
        """Use a rollout to improve the offset.

        Args:
            asked_ns: time of the rollout's request, by this process's clock.
            begun_ns: time of its begin, by the other clock.
            ended_ns: time of its end, by the other clock.
            heard_ns: time at which its header arrived, by this process's clock.

        Returns:
            Nanoseconds to add to the other clock's time to get this one's. The rollout then lies
            between request and answer, unless the clocks drifted by more than the messages took.
        """
        lowest, highest = asked_ns - begun_ns, heard_ns - ended_ns
        if self._lowest is not None and self._highest is not None:
            both = max(lowest, self._lowest), min(highest, self._highest)
            if both[0] <= both[1]:
                lowest, highest = both
        self._lowest, self._highest = lowest, highest
        # Processes of one host have the same clock.
        return 0 if lowest <= 0 <= highest else (lowest + highest) // 2

    @property
    def error_ns(self) -> int:
        """The largest possible error of the last offset, in nanoseconds."""
        if self._lowest is None or self._highest is None:
            return 0
        return max(0, self._highest - self._lowest + 1) // 2


class Trace:
    """Writes one file, on a thread of its own; every method may be called from any thread.

    After :meth:`close` the file is a complete JSON array. If the process is killed, the end of the
    array is missing, which viewers accept, and up to half a second of events.
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
        try:
            self._file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115 - see _run
        except OSError as error:
            raise ArgumentError(
                f"trace={str(path)!r} can't be written ({error.strerror}): name a file in a folder "
                "that exists and that you may write to"
            ) from error
        self._path = path
        self._left = max_events
        self._closed = False
        # Reentrant: garbage collection while it is held may close a collector.
        self._lock = threading.RLock()
        self._origin = clock()
        self._newest_us = 0.0
        self._ids = itertools.count(1)  # of processes and threads, all different
        self._threads: dict[tuple[int, str], int] = {}
        self._processes: dict[tuple[int, int], int] = {}  # of (worker_id, incarnation)
        self._clocks: dict[int, ClockOffset] = {}  # by process
        self._received_until: dict[int, int] = {}
        self._doing: tuple[str, int, int] | None = None
        self._num_fetches = 0
        self._queue: queue.SimpleQueue[list[dict[str, Any]]] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._trainer = self._new_process("trainer", BATCHES, sort_index=0)
        self._thread = threading.Thread(target=self._run, name="distcollect-trace", daemon=True)
        self._thread.start()

    # What is recorded. Times are nanoseconds of this process's clock.

    def activity(self, activity: str, begin: int, end: int) -> None:
        """The thread that takes batches did this; called in the order of time."""
        with self._lock:
            if self._doing is not None and self._doing[0] == activity and self._doing[2] == begin:
                self._doing = activity, self._doing[1], end
                return
            self._put_doing()
            self._doing = activity, begin, end

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
                self._spans(self._trainer, spans)
                return
            asking = f"ask worker {process[0]}"  # there is one request to a worker at a time
            self._spans(self._trainer, [(asking, ROLLOUT, request, heard)])
            ours = [span for span in spans if span[0] == STEPS]
            if not ours:
                return
            pid = self._process(*process)
            clock = self._clocks.setdefault(pid, ClockOffset())
            begun = min(begin for _, _, begin, _ in ours)
            ended = max(end for _, _, _, end in ours)
            offset = clock.narrow(request, begun, ended, heard)
            # Viewers drop a span that overlaps another one of its thread, which could happen when
            # the offset changes.
            earliest = {STEPS: request, WEIGHTS: self._received_until.get(pid, 0)}
            placed: list[Span] = []
            for thread, name, begin, end in spans:
                first = min(max(begin + offset, earliest[thread]), heard)
                last = min(max(end + offset, earliest[thread]), heard)
                placed.append((thread, name, first, last))
                if thread == WEIGHTS:
                    earliest[WEIGHTS] = last
            self._received_until[pid] = earliest[WEIGHTS]
            about = {"clock_ahead_s": -offset / 1e9, "error_s": clock.error_ns / 1e9}
            self._spans(pid, placed, {ROLLOUT: about} if offset else {})

    def fetched(self, worker_id: int, begin: int, end: int) -> None:
        """A rollout was fetched."""
        with self._lock:
            self._num_fetches += 1
            about = {
                "cat": "fetch",
                "name": f"fetch from worker {worker_id}",
                "pid": self._trainer,
                "tid": self._tid(self._trainer, BATCHES),
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
            self._spans(self._trainer, [(WEIGHTS, *step) for step in steps])

    def close(self) -> None:
        """Write what is left, and end the array. A second call does nothing."""
        with self._lock:
            if not self._closed:
                self._put_doing()
                self._end("end of the trace")
        self._closing.set()
        # A collector without references may be finalized on that very thread.
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_TIMEOUT_S)

    # Events.

    def _put_doing(self) -> None:
        if self._doing is not None:
            activity, begin, end = self._doing
            self._doing = None
            self._spans(self._trainer, [(BATCHES, activity, begin, end)])

    def _spans(
        self, process: int, spans: Sequence[Span], about: Mapping[str, Any] = _NOTHING
    ) -> None:
        """Write spans; ``about`` maps a span's name to its arguments."""
        self._put(
            [
                {
                    "ph": "X",
                    "name": name,
                    "pid": process,
                    "tid": self._tid(process, thread),
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

    def _process(self, worker_id: int, incarnation: int) -> int:
        key = worker_id, incarnation
        if key not in self._processes:
            name = f"worker {worker_id}"
            if incarnation:
                name += f", incarnation {incarnation}"
            self._processes[key] = self._new_process(name, STEPS, sort_index=1 + worker_id)
        return self._processes[key]

    def _new_process(self, name: str, main_thread: str, *, sort_index: int) -> int:
        """A new id for a process; process ids of several hosts could be equal."""
        process = next(self._ids)
        self._threads[process, main_thread] = process
        self._put(
            [
                _about("process_name", process, process, name=name),
                _about("process_sort_index", process, process, sort_index=sort_index),
                _about("thread_name", process, process, name=main_thread),
            ]
        )
        return process

    def _tid(self, process: int, thread: str) -> int:
        key = process, thread
        if key not in self._threads:
            self._threads[key] = next(self._ids)
            self._put([_about("thread_name", process, self._threads[key], name=thread)])
        return self._threads[key]

    def _put(self, events: list[dict[str, Any]]) -> None:
        if self._closed or not events:
            return
        if len(events) > self._left:
            self._end(_FULL)
            return
        self._left -= len(events)
        self._queue.put(events)

    def _end(self, reason: str) -> None:
        self._closed = True
        about = {"ph": "i", "s": "g", "name": reason, "pid": self._trainer, "tid": self._trainer}
        self._queue.put([{**about, "ts": self._newest_us}])
        self._queue.put([])  # tells the thread to end

    # The thread that writes.

    def _run(self) -> None:
        try:
            with self._file:
                self._write()
        except OSError:
            # A trace must never end a run.
            log.exception("the trace %s ends here; the run goes on", self._path)
            with self._lock:
                self._closed = True

    def _write(self) -> None:
        between = "[\n"
        while True:
            gathered = [self._queue.get()]
            # More events may follow at once; they are written together.
            self._closing.wait(_GATHER_S)
            while not self._queue.empty():
                gathered.append(self._queue.get())
            events = [event for some in gathered for event in some]
            # Commas are written before events, so that none follows the last event.
            lines = [json.dumps(event, separators=(",", ":")) for event in events]
            if lines:
                self._file.write(between + ",\n".join(lines))
                between = ",\n"
            if not gathered[-1]:
                self._file.write("\n]\n")
                break
            self._file.flush()
        if events and events[-1]["name"] == _FULL:
            log.warning("the trace %s is full, and ends here; the run goes on", self._path)


def _about(what: str, process: int, thread: int, **args: object) -> dict[str, Any]:
    """An event that names or sorts a process or a thread for a viewer."""
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": args}
