"""Who is in the run: workers join, serve, fall silent, leave, or are lost and replaced.

Pure decisions: no clock, no thread, no socket, no lock. The caller passes the time, in seconds of
any clock that only goes forward.

::

    PAUSED ─▶ STARTED ─▶ PROBING ─▶ READY ◀─▶ SUSPECTED ─▶ DRAINING ─▶ EXITING
      ▲          └──────────┴─────────┴───── ended ─────────────┴─────────┘
      │ after a delay                          │
      ├────────────────────────────────────────┤
      │     no restart left, slot closed       ├──▶ LOST ──▶ PAUSED when the slot is opened again
      │              it left on purpose        └──▶ LEFT ──▶ the same

A slot without a process becomes LOST or LEFT in the same way.
"""

from __future__ import annotations

import enum
import math
import random
from collections.abc import Collection
from dataclasses import dataclass, field

from distcollect.common.backoff import backoff_s
from distcollect.errors import is_server
from distcollect.results import WorkerState

# After a process was ready for this long, it counts as the first start in its slot.
_SOUND_AFTER_S = 60.0
# The pause before the second replacement in a row in a slot; it doubles each time.
_FIRST_DELAY_S = 0.5
# How many pings are sent within the time after which a silent process is lost.
_PINGS_PER_SILENCE = 4

PRESENT = (WorkerState.READY, WorkerState.SUSPECTED)


class WorkerPhase(enum.Enum):
    """The phase of a worker: of the process in its slot, or of the empty slot."""

    PAUSED = enum.auto()  # there is no process; the next one is started at the deadline
    STARTED = enum.auto()  # its process has to join, and to connect its transport
    PROBING = enum.auto()  # it makes its envs and policy, and tries them out
    READY = enum.auto()  # it serves requests
    SUSPECTED = enum.auto()  # it does, but gave no sign of life for a while
    DRAINING = enum.auto()  # it is to end, and still owes the pool something
    EXITING = enum.auto()  # it was told to end
    LOST = enum.auto()  # there is no process, and none is started before the slot is opened again
    LEFT = enum.auto()  # the same, as it left on purpose


_EMPTY = (WorkerPhase.PAUSED, WorkerPhase.LOST, WorkerPhase.LEFT)
_STARTING = (WorkerPhase.STARTED, WorkerPhase.PROBING)
_SERVING = (WorkerPhase.READY, WorkerPhase.SUSPECTED)
# What users see of a phase; of the others, that the worker is ready.
_SEEN_AS = {
    **dict.fromkeys((WorkerPhase.PAUSED, *_STARTING), WorkerState.JOINING),
    WorkerPhase.SUSPECTED: WorkerState.SUSPECTED,
    WorkerPhase.LOST: WorkerState.LOST,
    WorkerPhase.LEFT: WorkerState.LEFT,
}


@dataclass(frozen=True)
class MembershipCommand:
    """What to do with a process.

    Attributes:
        reason: why it is to be ended, for people; "" if it isn't.
    """

    worker_id: int
    incarnation: int
    reason: str = ""


class Start(MembershipCommand):
    """Start a process in a slot."""


class Ping(MembershipCommand):
    """Ping a process."""


class Overdue(MembershipCommand):
    """End a process that missed a deadline, and report it as ended."""


@dataclass(eq=False)
class WorkerRecord:
    """A worker: its slot, and the process in it.

    Attributes:
        phase: see :class:`WorkerPhase`.
        incarnation: of the process in the slot, or of the next one if there is none.
        deadline: when to start the next process; of a process: when it is overdue.
        successor: what the slot becomes when its process ends: PAUSED, LOST or LEFT.
        starts: starts in a row, since a process was ready for a minute.
        ready_at: since when the process is ready; infinite: it isn't.
        asked_at: when the first ping was sent that the process, which has to be ready, has not
            answered; infinite: it owes none.
        ping_at: when to ping it next.
    """

    phase: WorkerPhase = WorkerPhase.PAUSED
    incarnation: int = 0
    deadline: float = math.inf
    successor: WorkerPhase = WorkerPhase.PAUSED
    starts: int = 0
    ready_at: float = math.inf
    asked_at: float = math.inf
    ping_at: float = math.inf

    @property
    def is_empty(self) -> bool:
        """Return True if there is no process."""
        return self.phase in _EMPTY


@dataclass
class Membership:
    """Decides which processes are started, pinged, suspected and given up, and when.

    A trainer that can't act for a while (a stopped process, a main thread that holds the
    interpreter lock) hears no signs of life in that time. So all deadlines of processes are
    extended by the time for which :meth:`tick` was called later than :meth:`next_tick` said.

    Attributes:
        silence_timeout_s: a ready process that answers no ping for so long is lost. It counts from
            the first of these: before, nobody asked whether it lives.
        start_timeout_s: from a process's start until it has to be ready.
        max_restarts: how many starts in a row may follow the first in a slot, while none of these
            processes is ready for a minute.
        longest_pause_s: the longest pause between two of these starts.
        evaluating: slots of workers that collect nothing.
    """

    silence_timeout_s: float
    start_timeout_s: float
    max_restarts: int
    longest_pause_s: float = 30.0
    evaluating: Collection[int] = ()
    rng: random.Random = field(default_factory=random.Random)
    _records: dict[int, WorkerRecord] = field(default_factory=dict)
    _called_at: float = math.inf

    @property
    def states(self) -> dict[int, WorkerState]:
        """Return what users see of every worker's slot."""
        return {w: self.state(w) for w in self._records if not is_server(w)}

    def state(self, worker_id: int) -> WorkerState:
        """Return what users see of one slot; LEFT if there is no such slot."""
        return _SEEN_AS.get(self.phase(worker_id), WorkerState.READY)

    def phase(self, worker_id: int) -> WorkerPhase:
        """The phase of one slot; LEFT if there is no such slot."""
        record = self._records.get(worker_id)
        return WorkerPhase.LEFT if record is None else record.phase

    @property
    def num_hopeful(self) -> int:
        """Return how many slots have a worker that collects, or will have one."""
        gone = (WorkerState.LOST, WorkerState.LEFT)
        return sum(s not in gone for w, s in self.states.items() if w not in self.evaluating)

    def is_given_up(self, worker_id: int) -> bool:
        """Return True if processes could be started in this slot, but too many have ended."""
        record = self._records[worker_id]
        return record.phase is WorkerPhase.LOST and record.successor is WorkerPhase.PAUSED

    def _process(self, worker_id: int, incarnation: int) -> WorkerRecord | None:
        record = self._records.get(worker_id)
        if record is None or record.is_empty or record.incarnation != incarnation:
            return None
        return record

    def open(self, worker_id: int, now: float) -> None:
        """Processes can be started in this slot; start one if it is new, LOST or LEFT."""
        record = self._records.setdefault(worker_id, WorkerRecord(WorkerPhase.LOST))
        if record.phase in (WorkerPhase.LOST, WorkerPhase.LEFT):
            record.phase = record.successor = WorkerPhase.PAUSED
            record.starts = 0
            record.deadline = now
        elif record.successor is WorkerPhase.LOST:
            record.successor = WorkerPhase.PAUSED

    def close(self, worker_id: int) -> None:
        """No process can be started in this slot, until :meth:`open`; a running one goes on."""
        record = self._records.get(worker_id)
        if record is not None and record.successor is WorkerPhase.PAUSED:
            record.successor = WorkerPhase.LOST
            self._vacate(record)

    def leave(self, worker_id: int, within_s: float, now: float) -> None:
        """The worker leaves on purpose, and is not replaced.

        Its process is overdue after ``within_s``.
        """
        record = self._records.get(worker_id)
        if record is None or record.successor is WorkerPhase.LEFT:
            return
        self._excuse_absence(now)
        record.successor = WorkerPhase.LEFT
        record.deadline = now + within_s
        self._vacate(record)

    def _vacate(self, record: WorkerRecord) -> None:
        """No further process is started: an empty slot becomes what it would after a process."""
        if record.is_empty:
            record.phase = record.successor
            record.deadline = math.inf

    def joined(self, worker_id: int, incarnation: int) -> bool:
        """A started process can be reached, and is probed; returns False if it is unknown."""
        record = self._process(worker_id, incarnation)
        if record is None or record.phase is not WorkerPhase.STARTED:
            return False
        record.phase = WorkerPhase.PROBING
        return True

    def ready(self, worker_id: int, incarnation: int, now: float) -> bool:
        """A started process is ready; returns False if it is unknown."""
        record = self._process(worker_id, incarnation)
        if record is None or record.phase not in _STARTING:
            return False
        self._excuse_absence(now)
        record.phase = WorkerPhase.READY
        record.ready_at = now
        if record.successor is not WorkerPhase.LEFT:
            record.deadline = math.inf
        self._plan_ping(record, now)
        return True

    def heard(self, worker_id: int, incarnation: int, now: float) -> None:
        """A process gave a sign of life."""
        record = self._process(worker_id, incarnation)
        if record is None or record.phase in _STARTING:
            return
        self._excuse_absence(now)
        record.asked_at = math.inf
        if record.phase is WorkerPhase.SUSPECTED:
            record.phase = WorkerPhase.READY

    def drain(self, worker_id: int, incarnation: int) -> bool:
        """A ready process is to end once it owes nothing; returns False if it isn't ready."""
        record = self._process(worker_id, incarnation)
        if record is None or record.phase not in _SERVING:
            return False
        record.phase = WorkerPhase.DRAINING
        return True

    def drained(self, worker_id: int, incarnation: int, within_s: float, now: float) -> bool:
        """A DRAINING process owes nothing, and ends within this time; False if it isn't that."""
        record = self._process(worker_id, incarnation)
        if record is None or record.phase is not WorkerPhase.DRAINING:
            return False
        record.phase = WorkerPhase.EXITING
        record.deadline = min(record.deadline, now + within_s)
        return True

    def ended(self, worker_id: int, incarnation: int, now: float) -> bool:
        """A process has ended, or is ignored from now on; returns False if it was known before."""
        record = self._process(worker_id, incarnation)
        if record is None:
            return False
        if now - record.ready_at >= _SOUND_AFTER_S:
            record.starts = 1
        if record.successor is WorkerPhase.PAUSED and record.starts > self.max_restarts:
            record.phase = WorkerPhase.LOST
        else:
            record.phase = record.successor
        is_replaced = record.phase is WorkerPhase.PAUSED
        record.deadline = now + self._delay(record.starts) if is_replaced else math.inf
        record.ready_at = record.asked_at = record.ping_at = math.inf
        record.incarnation += 1
        return True

    def delay(self, worker_id: int, now: float) -> float | None:
        """Seconds until the next process is started in this slot; None: no start is planned."""
        record = self._records[worker_id]
        return max(0.0, record.deadline - now) if record.phase is WorkerPhase.PAUSED else None

    def tick(self, now: float) -> list[MembershipCommand]:
        """Return what to do now, in the order in which it was due.

        Each command is returned once, but :class:`Overdue` until the process was reported as ended.
        """
        self._excuse_absence(now)
        due = sorted((at, w) for w, r in self._records.items() if (at := self._due_at(r)) <= now)
        commands = [self._act(worker_id, now) for _, worker_id in due]
        return [command for command in commands if command is not None]

    def next_tick(self, now: float) -> float:
        """By when to call :meth:`tick`; before that it returns nothing, unless an event comes."""
        records = self._records.values()
        # Also when nothing is due: see above, of a trainer that can't act for a while.
        due_at = min(map(self._due_at, records), default=math.inf)
        if all(record.is_empty for record in records):
            return due_at
        return min(due_at, now + self._ping_period_s)

    def _act(self, worker_id: int, now: float) -> MembershipCommand | None:
        """Do what is due for a slot; may suspect its process."""
        record = self._records[worker_id]
        command: MembershipCommand | None = None
        if record.phase is WorkerPhase.PAUSED:
            record.phase = WorkerPhase.STARTED
            record.starts += 1
            record.deadline = now + self.start_timeout_s
            command = Start(worker_id, record.incarnation)
        elif reason := self._missed_deadline(record, now):
            command = Overdue(worker_id, record.incarnation, reason)
        else:
            if record.phase is WorkerPhase.READY and now >= self._suspected_from(record):
                record.phase = WorkerPhase.SUSPECTED
            if now >= record.ping_at:
                record.asked_at = min(record.asked_at, now)
                self._plan_ping(record, now)
                command = Ping(worker_id, record.incarnation)
        return command

    def _missed_deadline(self, record: WorkerRecord, now: float) -> str:
        """Return why the process is to be ended; "" if it is not."""
        if now >= record.deadline:
            if record.phase in _STARTING and record.successor is not WorkerPhase.LEFT:
                return f"it was not ready within {self.start_timeout_s:g} s of its start"
            return "it took too long to leave"
        if now >= record.asked_at + self.silence_timeout_s:
            return f"no sign of life for {now - record.asked_at:.1f} s"
        return ""

    def _due_at(self, record: WorkerRecord) -> float:
        """Return when something is to be done for a slot."""
        silent_from = record.asked_at + self.silence_timeout_s
        if record.phase is WorkerPhase.READY:
            silent_from = self._suspected_from(record)
        return min(record.deadline, record.ping_at, silent_from)

    def _suspected_from(self, record: WorkerRecord) -> float:
        return record.asked_at + self.silence_timeout_s / 2

    @property
    def _ping_period_s(self) -> float:
        return self.silence_timeout_s / _PINGS_PER_SILENCE

    def _plan_ping(self, record: WorkerRecord, now: float) -> None:
        # At random times: hundreds of workers may have become ready at the same moment.
        record.ping_at = now + self._ping_period_s * self.rng.uniform(0.5, 1.0)

    def _excuse_absence(self, now: float) -> None:
        absent_s = now - self._called_at - self._ping_period_s
        self._called_at = now
        if absent_s > 0:
            for record in self._records.values():
                if not record.is_empty:
                    record.asked_at += absent_s
                    record.deadline += absent_s

    def _delay(self, starts: int) -> float:
        pause_s = backoff_s(starts, _FIRST_DELAY_S, self.longest_pause_s)
        return pause_s * self.rng.uniform(0.75, 1.0) if pause_s else 0.0
