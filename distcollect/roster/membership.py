"""Who is in the run: workers join, serve, fall silent, leave, or are lost and replaced.

Pure decisions: no clock, no thread, no socket, no lock. The caller passes the time, in seconds of
any clock that only goes forward.

::

             started           probed              silent
    JOINING ─────────▶ JOINING ───────▶ READY ◀──────────────▶ SUSPECTED
       ▲                  │               │      heard from       │
       │ after a delay    └───────────────┴──────── ended ────────┘
       └──────────────────────────────────┤
           no restart left, slot closed   ├──▶ LOST ──▶ JOINING when the slot is opened again
                     it left on purpose   └──▶ LEFT ──▶ the same

A slot without a process becomes LOST or LEFT in the same way.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import TypeAlias

from distcollect.common.backoff import backoff_s
from distcollect.common.due_times import DueTimes
from distcollect.results import WorkerState

# After a process was ready for this long, it counts as the first start in its slot.
_SOUND_AFTER_S = 60.0
# The pause before the second replacement in a row in a slot; it doubles each time.
_FIRST_DELAY_S = 0.5
# How many pings are sent within the time after which a silent process is lost.
_PINGS_PER_SILENCE = 4


PRESENT = (WorkerState.READY, WorkerState.SUSPECTED)


@dataclass(frozen=True)
class Start:
    """Start a process in a slot."""

    worker_id: int
    incarnation: int


@dataclass(frozen=True)
class Ping:
    """Ping a process."""

    worker_id: int
    incarnation: int


@dataclass(frozen=True)
class Overdue:
    """End a process that missed a deadline, and report it as ended.

    Attributes:
        reason: which deadline, for people.
    """

    worker_id: int
    incarnation: int
    reason: str


Command: TypeAlias = Start | Ping | Overdue


@dataclass
class _Slot:
    """A worker's slot.

    Attributes:
        incarnation: of the process in it, or of the next one if there is none.
        running: a process was started, and has not ended.
        start_at: when to start the next process; None: not before the slot is opened again.
        join_by: by when the running process has to be ready, or to have left.
        ready_at: since when the running process is ready; None: it isn't.
        starts: starts in a row, since a process was ready for a minute.
        heard_at: when the process last gave a sign of life.
        ping_at: when to ping it next.
        is_open: a process can be started.
        leaving: this process is not replaced.
        overdue: its end was requested.
        is_watched: it counts among the processes that have deadlines.
    """

    state: WorkerState = WorkerState.JOINING
    incarnation: int = 0
    running: bool = False
    start_at: float | None = None
    join_by: float = math.inf
    ready_at: float | None = None
    starts: int = 0
    heard_at: float = 0.0
    ping_at: float = 0.0
    is_open: bool = True
    leaving: bool = False
    overdue: bool = False
    is_watched: bool = False


@dataclass
class Membership:
    """Decides which processes are started, pinged, suspected and given up, and when.

    A trainer that can't act for a while (a stopped process, a main thread that holds the
    interpreter lock) hears no signs of life in that time. So all deadlines of processes are
    extended by the time for which :meth:`tick` was called later than :meth:`next_tick` said.

    Attributes:
        silence_timeout_s: a ready process that gives no sign of life for so long is lost.
        start_timeout_s: from a process's start until it has to be ready.
        max_restarts: how many starts in a row may follow the first in a slot, while none of these
            processes is ready for a minute.
        longest_pause_s: the longest pause between two of these starts.
    """

    silence_timeout_s: float
    start_timeout_s: float
    max_restarts: int
    longest_pause_s: float = 30.0
    rng: random.Random = field(default_factory=random.Random)
    _slots: dict[int, _Slot] = field(default_factory=dict)
    _called_at: float = math.inf
    _due_times: DueTimes[int] = field(default_factory=DueTimes)  # of slots, for tick
    _num_watched: int = 0
    _states: dict[int, WorkerState] | None = None  # None: to be worked out

    @property
    def states(self) -> dict[int, WorkerState]:
        """The state of every slot, by worker_id; to be read only."""
        if self._states is None:
            self._states = {
                worker_id: slot.state for worker_id, slot in sorted(self._slots.items())
            }
        return self._states

    def state(self, worker_id: int) -> WorkerState:
        """The state of one slot; LEFT if there is no such slot."""
        slot = self._slots.get(worker_id)
        return WorkerState.LEFT if slot is None else slot.state

    @property
    def num_hopeful(self) -> int:
        """How many slots have a worker, or will have one."""
        return sum(
            slot.state not in (WorkerState.LOST, WorkerState.LEFT) for slot in self._slots.values()
        )

    def has_process(self, worker_id: int, incarnation: int) -> bool:
        """Whether this process is the one that runs in the slot, as far as is known."""
        slot = self._slots.get(worker_id)
        return slot is not None and slot.running and slot.incarnation == incarnation

    def open(self, worker_id: int, now: float) -> None:
        """Processes can be started in this slot; start one if it is new, LOST or LEFT."""
        slot = self._slots.setdefault(worker_id, _Slot(start_at=now))
        slot.is_open = True
        if slot.state in (WorkerState.LOST, WorkerState.LEFT):
            slot.state = WorkerState.JOINING
            slot.leaving = False
            slot.starts = 0
            slot.start_at = now
        self._changed(worker_id, slot)

    def close(self, worker_id: int) -> None:
        """No process can be started in this slot, until :meth:`open`; a running one goes on."""
        slot = self._slots.get(worker_id)
        if slot is None:
            return
        slot.is_open = False
        if not slot.running and slot.state is WorkerState.JOINING:
            slot.state = WorkerState.LOST
            slot.start_at = None
        self._changed(worker_id, slot)

    def ready(self, worker_id: int, incarnation: int, now: float) -> None:
        """A started process is ready."""
        if not self.has_process(worker_id, incarnation):
            return
        slot = self._slots[worker_id]
        self._excuse_absence(now)
        slot.state = WorkerState.READY
        slot.ready_at = now
        slot.heard_at = now
        self._plan_ping(slot, now)
        self._changed(worker_id, slot)

    def heard(self, worker_id: int, incarnation: int, now: float) -> None:
        """A process gave a sign of life."""
        if not self.has_process(worker_id, incarnation):
            return
        slot = self._slots[worker_id]
        self._excuse_absence(now)
        slot.heard_at = now
        if slot.state is WorkerState.SUSPECTED:
            slot.state = WorkerState.READY
        self._changed(worker_id, slot)

    def leave(self, worker_id: int, within_s: float, now: float) -> None:
        """The worker leaves on purpose, and is not replaced.

        Its process is overdue after ``within_s``.
        """
        slot = self._slots.get(worker_id)
        if slot is None or slot.leaving:
            return
        self._excuse_absence(now)
        slot.leaving = True
        slot.join_by = now + within_s
        if not slot.running:
            slot.state = WorkerState.LEFT
            slot.start_at = None
        self._changed(worker_id, slot)

    def ended(self, worker_id: int, incarnation: int, now: float) -> bool:
        """A process has ended, or is ignored from now on; returns False if it was known before."""
        if not self.has_process(worker_id, incarnation):
            return False
        slot = self._slots[worker_id]
        if slot.ready_at is not None and now - slot.ready_at >= _SOUND_AFTER_S:
            slot.starts = 1
        slot.running = slot.overdue = False
        slot.ready_at = None
        slot.incarnation += 1
        if slot.leaving:
            slot.state = WorkerState.LEFT
        elif not slot.is_open or slot.starts > self.max_restarts:
            slot.state = WorkerState.LOST
        else:
            slot.state = WorkerState.JOINING
            slot.start_at = now + self._delay(slot.starts)
        self._changed(worker_id, slot)
        return True

    def delay(self, worker_id: int, now: float) -> float | None:
        """Seconds until the next process is started in this slot; None: no start is planned."""
        slot = self._slots[worker_id]
        return None if slot.start_at is None else max(0.0, slot.start_at - now)

    def tick(self, now: float) -> list[Command]:
        """What to do now, in the order in which it was due; each command is returned once.

        Only slots for which something is due are looked at.
        """
        self._excuse_absence(now)
        commands: list[Command] = []
        for worker_id in self._due_times.take(now):
            slot = self._slots[worker_id]
            command = self._due(worker_id, slot, now)
            if command is not None:
                commands.append(command)
            self._changed(worker_id, slot)
        return commands

    def next_tick(self, now: float) -> float:
        """By when to call :meth:`tick`; before that it returns nothing, unless an event comes."""
        # Also when nothing is due: see above, of a trainer that can't act for a while.
        latest = now + self._ping_period_s if self._num_watched else math.inf
        return min(self._due_times.first, latest)

    def _changed(self, worker_id: int, slot: _Slot) -> None:
        """Note when a slot is due, and what else depends on it: it was changed."""
        self._due_times.set(worker_id, self._due_time(slot))
        is_watched = slot.running and not slot.overdue
        self._num_watched += is_watched - slot.is_watched
        slot.is_watched = is_watched
        if self._states is not None and self._states.get(worker_id) is not slot.state:
            self._states = None

    def _due_time(self, slot: _Slot) -> float:
        """When something is to be done for a slot."""
        if not slot.running:
            return math.inf if slot.start_at is None else slot.start_at
        if slot.overdue:
            return math.inf
        time = slot.join_by if slot.state is WorkerState.JOINING or slot.leaving else math.inf
        if slot.state in PRESENT:
            time = min(time, slot.ping_at, self._silent_from(slot))
        return time

    def _due(self, worker_id: int, slot: _Slot, now: float) -> Command | None:
        if not slot.running:
            if slot.start_at is None or slot.start_at > now:
                return None
            slot.running = True
            slot.start_at = None
            slot.starts += 1
            slot.join_by = now + self.start_timeout_s
            return Start(worker_id, slot.incarnation)
        if slot.overdue:
            return None
        reason = self._missed_deadline(slot, now)
        if reason:
            slot.overdue = True
            return Overdue(worker_id, slot.incarnation, reason)
        if slot.state in PRESENT and now >= slot.ping_at:
            self._plan_ping(slot, now)
            return Ping(worker_id, slot.incarnation)
        return None

    def _missed_deadline(self, slot: _Slot, now: float) -> str:
        """Why the process is to be ended; "" if it is not. May suspect it."""
        if slot.leaving and now >= slot.join_by:
            return "it took too long to leave"
        if slot.state is WorkerState.JOINING and now >= slot.join_by:
            return f"it was not ready within {self.start_timeout_s:g} s of its start"
        if slot.state in PRESENT:
            if now >= slot.heard_at + self.silence_timeout_s:
                return f"no sign of life for {now - slot.heard_at:.1f} s"
            if now >= slot.heard_at + self.silence_timeout_s / 2:
                slot.state = WorkerState.SUSPECTED
        return ""

    @property
    def _ping_period_s(self) -> float:
        return self.silence_timeout_s / _PINGS_PER_SILENCE

    def _silent_from(self, slot: _Slot) -> float:
        share = 1 if slot.state is WorkerState.SUSPECTED else 0.5
        return slot.heard_at + share * self.silence_timeout_s

    def _plan_ping(self, slot: _Slot, now: float) -> None:
        # At random times: hundreds of workers may have become ready at the same moment.
        slot.ping_at = now + self._ping_period_s * self.rng.uniform(0.5, 1.0)

    def _excuse_absence(self, now: float) -> None:
        absent_s = now - self._called_at - self._ping_period_s
        self._called_at = now
        if absent_s > 0:
            for worker_id, slot in self._slots.items():
                slot.heard_at += absent_s
                slot.join_by += absent_s
                self._changed(worker_id, slot)

    def _delay(self, starts: int) -> float:
        pause_s = backoff_s(starts, _FIRST_DELAY_S, self.longest_pause_s)
        return pause_s * self.rng.uniform(0.75, 1.0) if pause_s else 0.0
