"""Who is in the run: workers join, serve, fall silent, leave, or are lost and replaced.

Pure decisions: no clock, no thread, no socket. Nothing here locks; the caller does, and tells the
time in seconds of any clock that only goes forward.

::

             started           probed              silent
    JOINING ─────────▶ JOINING ───────▶ READY ◀──────────────▶ SUSPECTED
       ▲                  │               │      heard from       │
       │ after a delay    └───────────────┴──────── ended ────────┘
       └──────────────────────────────────┤
                 no start left, no place  ├──▶ LOST ──▶ JOINING when a place is there (again)
                     it left on purpose   └──▶ LEFT ──▶ the same

A slot without a process goes to LOST or LEFT just so.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import TypeAlias

from distcollect.common.backoff import backoff_s
from distcollect.results import WorkerState as State

# A process that was ready for so long has shown that it can work: its slot's starts count anew.
_SOUND_AFTER_S = 60.0
# Before the second replacement in a row in a slot; then twice as long each time.
_FIRST_DELAY_S = 0.5
# Signs of life are asked for so often within the time after which silence is a loss.
_PINGS_PER_SILENCE = 4


PRESENT = (State.READY, State.SUSPECTED)


@dataclass(frozen=True)
class Start:
    """Start a process in a slot."""

    worker_id: int
    incarnation: int


@dataclass(frozen=True)
class Ping:
    """Ask a process for a sign of life."""

    worker_id: int
    incarnation: int


@dataclass(frozen=True)
class Overdue:
    """End a process that is of no use any more, and report it as ended.

    Attributes:
        reason: why, for people.
    """

    worker_id: int
    incarnation: int
    reason: str


Command: TypeAlias = Start | Ping | Overdue


@dataclass
class _Slot:
    """A worker's slot.

    Attributes:
        incarnation: of the process in it, or of the next one if none is.
        running: a process was started, and has not ended.
        start_at: when the next one is to be started; None: not by itself.
        join_by: by when the running one has to be ready.
        ready_at: since when the running one is ready.
        starts: in a row, from the last one that proved sound.
        heard_at: when it last gave a sign of life.
        ping_at: when to ask for the next one.
        has_place: there is somewhere to start a process.
        leaving: nothing comes in place of this process.
        overdue: its end was asked for.
    """

    state: State = State.JOINING
    incarnation: int = 0
    running: bool = False
    start_at: float | None = None
    join_by: float = math.inf
    ready_at: float | None = None
    starts: int = 0
    heard_at: float = 0.0
    ping_at: float = 0.0
    has_place: bool = True
    leaving: bool = False
    overdue: bool = False


@dataclass
class Membership:
    """Decides who is started, asked, suspected and given up, and when.

    A trainer that doesn't look for a while (a stopped process, a main thread that holds the
    interpreter lock) hears nobody, and that is nobody's fault: what processes are waited for is put
    off by that time. Where :meth:`next_tick` is kept to, it is none.

    Attributes:
        silence_timeout_s: a ready process that gives no sign of life for so long is lost.
        start_timeout_s: from a process's start until it is ready.
        max_restarts: starts in a row, after the first, in a slot whose processes don't last.
        longest_pause_s: between two of these.
    """

    silence_timeout_s: float
    start_timeout_s: float
    max_restarts: int
    longest_pause_s: float = 30.0
    rng: random.Random = field(default_factory=random.Random)
    _slots: dict[int, _Slot] = field(default_factory=dict)
    _looked_at: float = math.inf

    @property
    def states(self) -> dict[int, State]:
        """Of all slots, by worker_id."""
        return {worker_id: slot.state for worker_id, slot in sorted(self._slots.items())}

    def state(self, worker_id: int) -> State:
        """Of one slot; LEFT if there is none."""
        slot = self._slots.get(worker_id)
        return State.LEFT if slot is None else slot.state

    @property
    def num_hopeful(self) -> int:
        """Slots whose worker is here, or on its way."""
        return sum(slot.state not in (State.LOST, State.LEFT) for slot in self._slots.values())

    def has_process(self, worker_id: int, incarnation: int) -> bool:
        """Whether this very process is the one that runs in the slot, as far as is known."""
        slot = self._slots.get(worker_id)
        return slot is not None and slot.running and slot.incarnation == incarnation

    def open(self, worker_id: int, now: float) -> None:
        """Have a worker in this slot from now on; in a new slot, or one that it was lost from."""
        slot = self._slots.setdefault(worker_id, _Slot(start_at=now))
        slot.has_place = True
        if slot.state in (State.LOST, State.LEFT):
            slot.state = State.JOINING
            slot.leaving = False
            slot.starts = 0
            slot.start_at = now

    def lose_place(self, worker_id: int) -> None:
        """There is nowhere to start a process for this slot, until :meth:`open`."""
        slot = self._slots.get(worker_id)
        if slot is None:
            return
        slot.has_place = False
        if not slot.running and slot.state is State.JOINING:
            slot.state = State.LOST
            slot.start_at = None

    def ready(self, worker_id: int, incarnation: int, now: float) -> None:
        """A started process has shown that it can work."""
        if not self.has_process(worker_id, incarnation):
            return
        slot = self._slots[worker_id]
        self._attend(now)
        slot.state = State.READY
        slot.ready_at = now
        slot.heard_at = now
        self._plan_ping(slot, now)

    def heard(self, worker_id: int, incarnation: int, now: float) -> None:
        """It gave a sign of life."""
        if not self.has_process(worker_id, incarnation):
            return
        slot = self._slots[worker_id]
        self._attend(now)
        slot.heard_at = now
        if slot.state is State.SUSPECTED:
            slot.state = State.READY

    def leave(self, worker_id: int, within_s: float, now: float) -> None:
        """Its worker is to go, or goes, on purpose: nobody comes in its place.

        It is overdue after ``within_s``.
        """
        slot = self._slots.get(worker_id)
        if slot is None or slot.leaving:
            return
        self._attend(now)
        slot.leaving = True
        slot.join_by = now + within_s
        if not slot.running:
            slot.state = State.LEFT
            slot.start_at = None

    def ended(self, worker_id: int, incarnation: int, now: float) -> bool:
        """Its process has ended, or must never be heard again; whether that was not known."""
        if not self.has_process(worker_id, incarnation):
            return False
        slot = self._slots[worker_id]
        if slot.ready_at is not None and now - slot.ready_at >= _SOUND_AFTER_S:
            slot.starts = 1
        slot.running = slot.overdue = False
        slot.ready_at = None
        slot.incarnation += 1
        if slot.leaving:
            slot.state = State.LEFT
        elif not slot.has_place or slot.starts > self.max_restarts:
            slot.state = State.LOST
        else:
            slot.state = State.JOINING
            slot.start_at = now + self._delay(slot.starts)
        return True

    def delay(self, worker_id: int, now: float) -> float | None:
        """Seconds until the next process is started in this slot; None: none is."""
        slot = self._slots[worker_id]
        return None if slot.start_at is None else max(0.0, slot.start_at - now)

    def tick(self, now: float) -> list[Command]:
        """What is to be done by now; each is said once."""
        self._attend(now)
        commands: list[Command] = []
        for worker_id, slot in self._slots.items():
            command = self._due(worker_id, slot, now)
            if command is not None:
                commands.append(command)
        return commands

    def next_tick(self, now: float) -> float:
        """By when to call :meth:`tick`; if nothing happens, it has nothing to say before."""
        times = [math.inf]
        for slot in self._slots.values():
            if not slot.running:
                times.append(math.inf if slot.start_at is None else slot.start_at)
            elif not slot.overdue:
                times.append(now + self._pause_s)
                if slot.state is State.JOINING or slot.leaving:
                    times.append(slot.join_by)
                if slot.state in PRESENT:
                    times += [slot.ping_at, self._silent_from(slot)]
        return min(times)

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
        reason = self._objection(slot, now)
        if reason:
            slot.overdue = True
            return Overdue(worker_id, slot.incarnation, reason)
        if slot.state in PRESENT and now >= slot.ping_at:
            self._plan_ping(slot, now)
            return Ping(worker_id, slot.incarnation)
        return None

    def _objection(self, slot: _Slot, now: float) -> str:
        """Why its process is to be ended; "" if it is not."""
        if slot.leaving and now >= slot.join_by:
            return "it was to leave, and took too long"
        if slot.state is State.JOINING and now >= slot.join_by:
            return f"it was not ready within {self.start_timeout_s:g} s of its start"
        if slot.state in PRESENT:
            if now >= slot.heard_at + self.silence_timeout_s:
                return f"no sign of life for {now - slot.heard_at:.1f} s"
            if now >= slot.heard_at + self.silence_timeout_s / 2:
                slot.state = State.SUSPECTED
        return ""

    @property
    def _pause_s(self) -> float:
        return self.silence_timeout_s / _PINGS_PER_SILENCE

    def _silent_from(self, slot: _Slot) -> float:
        share = 1 if slot.state is State.SUSPECTED else 0.5
        return slot.heard_at + share * self.silence_timeout_s

    def _plan_ping(self, slot: _Slot, now: float) -> None:
        # Not all at once: hundreds of workers were ready at the same moment.
        slot.ping_at = now + self._pause_s * self.rng.uniform(0.5, 1.0)

    def _attend(self, now: float) -> None:
        absent_s = now - self._looked_at - self._pause_s
        self._looked_at = now
        if absent_s > 0:
            for slot in self._slots.values():
                slot.heard_at += absent_s
                slot.join_by += absent_s

    def _delay(self, starts: int) -> float:
        pause_s = backoff_s(starts, _FIRST_DELAY_S, self.longest_pause_s)
        return pause_s * self.rng.uniform(0.75, 1.0) if pause_s else 0.0
