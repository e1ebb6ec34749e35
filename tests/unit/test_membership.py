"""Decisions about who is in the run: each rule by itself, and all of them in a simulated run."""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import pairwise
from typing import Any

import pytest

from distcollect.results import WorkerState as State
from distcollect.supervision.membership import Command, Membership, Overdue, Ping, Start

SILENCE_S = 8.0
START_S = 100.0
PAUSE_S = 2.0


def make(max_restarts: int = 3, seed: int = 0) -> Membership:
    return Membership(SILENCE_S, START_S, max_restarts, rng=random.Random(seed))


def working(now: float = 0.0, **settings: int) -> Membership:
    """With one slot, whose first process is ready."""
    membership = make(**settings)
    membership.open(0, now)
    assert membership.tick(now) == [Start(0, 0)]
    membership.ready(0, 0, now)
    return membership


def watch(membership: Membership, now: float, until: float) -> list[tuple[float, Command]]:
    """Look exactly when ``next_tick`` says, as long as that is not after ``until``."""
    said: list[tuple[float, Command]] = []
    looks_without_a_word = 0
    while (due := membership.next_tick(now)) <= until:
        now = max(now, due)
        commands = membership.tick(now)
        said += [(now, command) for command in commands]
        looks_without_a_word = 0 if commands else looks_without_a_word + 1
        assert looks_without_a_word < 1000, "it gets nowhere"
    assert membership.tick(until) == []
    return said


def only(kind: type, said: list[tuple[float, Command]]) -> list[tuple[float, Any]]:
    return [(when, command) for when, command in said if isinstance(command, kind)]


def test_a_slot_is_filled_at_once_and_once() -> None:
    membership = make()
    assert membership.next_tick(3.0) == math.inf
    membership.open(4, 3.0)
    assert membership.state(4) is State.JOINING
    assert membership.next_tick(3.0) <= 3.0
    assert not membership.has_process(4, 0)
    assert membership.tick(3.0) == [Start(4, 0)]
    assert membership.has_process(4, 0)
    membership.open(4, 4.0)
    assert membership.tick(4.0) == []
    membership.ready(4, 0, 5.0)
    assert membership.states == {4: State.READY}


def test_who_is_unknown_has_left() -> None:
    membership = make()
    assert membership.state(0) is State.LEFT
    membership.leave(0, 1.0, 0.0)
    membership.lose_place(0)
    membership.ready(0, 0, 0.0)
    membership.heard(0, 0, 0.0)
    assert not membership.ended(0, 0, 0.0)
    assert membership.states == {}


def test_a_process_has_to_be_ready_in_time() -> None:
    membership = make()
    membership.open(0, 0.0)
    membership.tick(0.0)
    assert watch(membership, 0.0, 50.0) == []
    membership.heard(0, 0, 50.0)
    assert watch(membership, 50.0, START_S - 0.001) == []
    ((when, overdue),) = watch(membership, START_S - 0.001, START_S + 10)
    assert (overdue.worker_id, overdue.incarnation) == (0, 0)
    assert when == pytest.approx(START_S)
    assert "not ready within 100 s" in overdue.reason
    assert membership.state(0) is State.JOINING
    assert membership.ended(0, 0, START_S + 10)
    assert membership.tick(START_S + 10) == [Start(0, 1)]


def test_who_is_ready_is_asked_for_signs_of_life() -> None:
    membership = working()
    now, pings = 0.0, []
    while now < 100:
        now = membership.next_tick(now)
        for command in membership.tick(now):
            assert command == Ping(0, 0)
            pings.append(now)
            membership.heard(0, 0, now + 0.1)
    pauses = [b - a for a, b in pairwise(pings)]
    assert PAUSE_S / 2 <= min(pauses) < 0.6 * PAUSE_S
    assert 0.9 * PAUSE_S < max(pauses) <= PAUSE_S * 1.001
    assert membership.state(0) is State.READY


def test_silence_is_suspicious_and_then_a_loss() -> None:
    membership = working()
    said = watch(membership, 0.0, SILENCE_S / 2 - 0.001)
    assert membership.state(0) is State.READY
    assert {type(command) for _, command in said} == {Ping}
    watch(membership, SILENCE_S / 2 - 0.001, SILENCE_S / 2)
    assert membership.state(0) is State.SUSPECTED
    said = watch(membership, SILENCE_S / 2, SILENCE_S + 10)
    ((when, overdue),) = only(Overdue, said)
    assert when == pytest.approx(SILENCE_S)
    assert "no sign of life for 8.0 s" in overdue.reason
    assert all(when < SILENCE_S for when, _ in only(Ping, said)), "nothing more is asked of it"
    assert membership.state(0) is State.SUSPECTED
    assert membership.has_process(0, 0)


def test_who_was_suspected_and_is_heard_is_ready() -> None:
    membership = working()
    watch(membership, 0.0, 7.0)
    assert membership.state(0) is State.SUSPECTED
    membership.heard(0, 0, 7.0)
    assert membership.state(0) is State.READY
    assert only(Overdue, watch(membership, 7.0, 14.9)) == []
    assert membership.state(0) is State.SUSPECTED
    assert len(only(Overdue, watch(membership, 14.9, 15.1))) == 1


def test_other_incarnations_are_not_heard() -> None:
    membership = working()
    assert membership.ended(0, 0, 1.0)
    assert not membership.ended(0, 0, 1.0)
    membership.heard(0, 1, 1.0)
    membership.ready(0, 1, 1.0)
    assert membership.state(0) is State.JOINING
    assert membership.tick(1.0) == [Start(0, 1)]
    for stale in (0, 2):
        membership.ready(0, stale, 2.0)
        assert not membership.ended(0, stale, 2.0)
        assert not membership.has_process(0, stale)
        assert membership.state(0) is State.JOINING
    membership.ready(0, 1, 2.0)
    watch(membership, 2.0, 9.0)
    membership.heard(0, 0, 9.0)
    assert membership.state(0) is State.SUSPECTED


def restarts(membership: Membership, now: float) -> list[float]:
    """Seconds from the end of each process to the start of the next, until none comes."""
    pauses = []
    while True:
        incarnation = len(pauses)
        assert membership.ended(0, incarnation, now)
        delay = membership.delay(0, now)
        due = membership.next_tick(now)
        assert (due == math.inf) == (delay is None)
        if delay is None:
            return pauses
        assert due == pytest.approx(now + delay)
        if delay:
            assert membership.tick(math.nextafter(due, 0)) == []
        assert membership.tick(due) == [Start(0, incarnation + 1)]
        pauses.append(due - now)
        now = due


def test_replacements_come_after_growing_pauses() -> None:
    membership = working(max_restarts=12)
    pauses = restarts(membership, 1.0)
    longest = [0, 0.5, 1, 2, 4, 8, 16, 30, 30, 30, 30, 30]
    assert len(pauses) == 12
    for pause, limit in zip(pauses, longest, strict=True):
        assert 0.75 * limit <= pause <= limit * 1.001
    assert len(set(pauses[-4:])) == 4, "who fails together would come back together"
    assert membership.state(0) is State.LOST
    assert membership.num_hopeful == 0


@pytest.mark.parametrize("max_restarts", [0, 1, 5])
def test_restarts_in_a_row_are_limited(max_restarts: int) -> None:
    membership = working(max_restarts=max_restarts)
    assert len(restarts(membership, 1.0)) == max_restarts
    assert membership.state(0) is State.LOST


@pytest.mark.parametrize("max_restarts", [0, 1, 5])
@pytest.mark.parametrize("sound", [True, False])
def test_a_sound_minute_starts_the_count_anew(max_restarts: int, *, sound: bool) -> None:
    membership = make(max_restarts)
    membership.open(0, 0.0)
    now = 0.0
    for incarnation in range(max_restarts + 1):
        now = membership.next_tick(now)
        assert membership.tick(now) == [Start(0, incarnation)]
        if incarnation < max_restarts:
            membership.ended(0, incarnation, now)
    membership.ready(0, max_restarts, now)
    now += 60.0 if sound else 59.9
    membership.ended(0, max_restarts, now)
    assert membership.state(0) is (State.JOINING if sound and max_restarts else State.LOST)
    if sound and max_restarts:
        assert membership.delay(0, now) == 0
        for further in range(1, max_restarts + 1):
            now = membership.next_tick(now)
            assert membership.tick(now) == [Start(0, max_restarts + further)]
            membership.ended(0, max_restarts + further, now)
        assert membership.state(0) is State.LOST


def test_a_long_time_in_joining_is_no_soundness() -> None:
    membership = make(0)
    membership.open(0, 0.0)
    membership.tick(0.0)
    membership.ended(0, 0, 90.0)
    assert membership.state(0) is State.LOST


def test_nobody_comes_for_who_leaves() -> None:
    membership = working()
    membership.leave(0, 5.0, 1.0)
    assert membership.state(0) is State.READY
    membership.ended(0, 0, 2.0)
    assert membership.state(0) is State.LEFT
    assert membership.delay(0, 2.0) is None
    assert membership.next_tick(2.0) == math.inf
    assert membership.tick(1000.0) == []
    assert membership.num_hopeful == 0


def test_who_leaves_has_only_so_much_time() -> None:
    membership = working()
    membership.leave(0, 5.0, 1.0)
    membership.leave(0, 500.0, 3.0)
    now = 1.0
    while now < 5:
        membership.heard(0, 0, now)
        assert only(Overdue, watch(membership, now, now + 1)) == []
        now += 1
    membership.heard(0, 0, 5.5)
    ((when, overdue),) = only(Overdue, watch(membership, 5.0, 20.0))
    assert when == pytest.approx(6.0)
    assert "took too long" in overdue.reason


def test_who_leaves_while_joining_has_only_so_much_time() -> None:
    membership = make()
    membership.open(0, 0.0)
    membership.tick(0.0)
    membership.leave(0, 5.0, 1.0)
    ((when, _),) = only(Overdue, watch(membership, 1.0, 20.0))
    assert when == pytest.approx(6.0)
    membership.ended(0, 0, 20.0)
    assert membership.state(0) is State.LEFT


def test_a_slot_whose_next_process_is_awaited_can_be_left() -> None:
    membership = working()
    membership.ended(0, 0, 0.0)
    membership.leave(0, 5.0, 0.0)
    assert membership.state(0) is State.LEFT
    assert membership.tick(100.0) == []


@pytest.mark.parametrize("left", [True, False])
def test_a_slot_can_be_opened_again(*, left: bool) -> None:
    membership = working(max_restarts=0)
    if left:
        membership.leave(0, 5.0, 1.0)
    membership.ended(0, 0, 2.0)
    assert membership.state(0) is (State.LEFT if left else State.LOST)
    membership.open(0, 3.0)
    assert membership.state(0) is State.JOINING
    assert membership.tick(3.0) == [Start(0, 1)]
    membership.ready(0, 1, 4.0)
    membership.heard(0, 1, 9.0)
    # It is not the one that was to leave.
    assert only(Overdue, watch(membership, 4.0, 12.0)) == []
    membership.ended(0, 1, 12.0)
    assert membership.state(0) is State.LOST


def test_without_a_place_nobody_is_started() -> None:
    membership = working()
    membership.lose_place(0)
    assert membership.state(0) is State.READY, "its process may live on"
    membership.ended(0, 0, 1.0)
    assert membership.state(0) is State.LOST
    assert membership.tick(1000.0) == []
    membership.open(0, 1000.0)
    assert membership.tick(1000.0) == [Start(0, 1)]


def test_a_place_that_goes_and_comes_back_while_its_process_runs_is_none_the_worse() -> None:
    membership = working()
    membership.lose_place(0)
    membership.open(0, 0.5)
    assert membership.tick(0.5) == []
    membership.ended(0, 0, 1.0)
    assert membership.tick(1.0) == [Start(0, 1)]


def test_a_place_may_go_before_a_process_was_started() -> None:
    membership = working()
    membership.ended(0, 0, 0.0)
    membership.lose_place(0)
    assert membership.state(0) is State.LOST
    assert membership.delay(0, 0.0) is None
    assert membership.tick(1000.0) == []


def test_hopeful_are_those_that_are_here_or_on_their_way() -> None:
    membership = make(max_restarts=0)
    for worker_id in range(5):
        membership.open(worker_id, 0.0)
    membership.tick(0.0)
    for worker_id in range(1, 5):
        membership.ready(worker_id, 0, 0.0)
    membership.leave(3, 1.0, 0.0)
    membership.ended(3, 0, 0.0)
    membership.ended(4, 0, 0.0)
    watch(membership, 0.0, 3.5)
    membership.heard(1, 0, 3.5)
    watch(membership, 3.5, 4.5)
    J, R, S, X, L = State.JOINING, State.READY, State.SUSPECTED, State.LOST, State.LEFT  # noqa: N806
    assert membership.states == {0: J, 1: R, 2: S, 3: L, 4: X}
    assert membership.num_hopeful == 3


@pytest.mark.parametrize("absent_s", [10.0, 1e5])
def test_a_trainer_that_did_not_look_loses_nobody(absent_s: float) -> None:
    membership = make()
    for worker_id in range(3):
        membership.open(worker_id, 0.0)
    membership.tick(0.0)
    membership.ready(0, 0, 0.0)
    membership.ready(1, 0, 0.0)
    membership.leave(1, 5.0, 0.0)
    membership.tick(1.0)
    # What they said meanwhile is heard one after the other, with looks in between.
    now = 1.0 + absent_s
    assert only(Overdue, [(now, command) for command in membership.tick(now)]) == []
    membership.heard(0, 0, now)
    membership.heard(1, 0, now)
    assert membership.tick(now) == []
    # And if they said nothing, there is as much time left as before, less one pause.
    said = only(Overdue, watch(membership, now, now + START_S))
    left_s = {command.worker_id: when - now for when, command in said}
    assert left_s == {
        0: pytest.approx(SILENCE_S),
        1: pytest.approx(5.0 - 1.0 - PAUSE_S),
        2: pytest.approx(START_S - 1.0 - PAUSE_S),
    }


def test_a_trainer_that_always_looks_late_still_sees_who_is_silent() -> None:
    membership = working()
    now, looks = 0.0, 0
    while not only(Overdue, [(now, command) for command in membership.tick(now)]):
        now, looks = now + 3 * PAUSE_S, looks + 1
    assert looks == SILENCE_S / PAUSE_S


def test_next_tick_is_never_late_however_late_it_is_asked_for() -> None:
    for asked_at in (0.0, 0.3, 1.0, 1.9):
        membership = working()
        due = membership.next_tick(asked_at)
        first = next(
            when
            for when in (step / 1000 for step in range(3000))
            if working_said(when)  # a new one each time: looking changes what is due
        )
        assert due <= first + 0.001


def working_said(when: float) -> list[Command]:
    return working().tick(when)


# What may become of a slot, besides nothing: see the module's docstring.
ARROWS = {
    (State.JOINING, State.READY),
    (State.READY, State.SUSPECTED),
    (State.SUSPECTED, State.READY),
    *((old, new) for old in (State.READY, State.SUSPECTED) for new in (State.JOINING,)),
    *(
        (old, new)
        for old in (State.JOINING, State.READY, State.SUSPECTED)
        for new in (State.LOST, State.LEFT)
    ),
    (State.LOST, State.JOINING),
    (State.LEFT, State.JOINING),
    (State.LOST, State.LEFT),
}


class Process:
    """A simulated worker process."""

    def __init__(self, worker_id: int, incarnation: int) -> None:
        self.key = (worker_id, incarnation)
        self.alive = True
        self.silent = False
        self.joined = False
        self.heard_at = 0.0  # by the trainer, in attended time
        self.pinged_at = 0.0
        self.leave_by = math.inf
        self.join_by = math.inf


class Simulation:
    """Thousands of processes that fail in every way, and a trainer who looks now and then."""

    def __init__(self, seed: int, num_slots: int) -> None:
        self.about = f"seed {seed}, {num_slots} slots"
        self.rng = random.Random(seed)
        self.max_restarts = self.rng.choice([0, 2, 10])
        self.membership = make(self.max_restarts, seed)
        self.num_slots = num_slots
        self.now = 0.0
        self.attended = 0.0
        self.looked_at = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.num_events = 0
        self.processes: dict[int, Process] = {}
        self.past: list[tuple[int, int]] = []
        self.newest: dict[int, int] = defaultdict(lambda: -1)
        self.states: dict[int, State] = {}
        self.left: set[int] = set()  # told to, and not opened again
        self.no_place: set[int] = set()
        self.starts: Counter[int] = Counter()
        self.ready_at: dict[int, float] = {}
        self.awaited: dict[int, float] = {}  # slots to be filled, and by when
        self.counts: Counter[str] = Counter()
        self.most_pings = 0
        self.steady = 0  # looks since the last absence

    # What the trainer does.

    def run(self, num_events: int) -> Simulation:
        for worker_id in range(self.num_slots):
            self.open(worker_id)
        self.fault()
        while self.num_events < num_events:
            if self.rng.random() < 0.003:
                self.now += self.rng.choice([3.0, 30.0, 1000.0])
                self.counts["absences"] += 1
                self.steady = 0
            elif self.rng.random() < 10 / (10 + self.num_slots):
                due = self.membership.next_tick(self.now)
                self.now = min(max(due, self.now), self.now + 0.4)
            else:
                self.now += self.rng.uniform(0.0, 0.4)
            while self.events and self.events[0][0] <= self.now:
                _, _, event = heappop(self.events)
                event()
                if self.rng.random() < 30 / (30 + 10 * self.num_slots):
                    self.look()
            self.look()
        return self

    def later(self, delay_s: float, event: Callable[[], None]) -> None:
        self.num_events += 1
        heappush(self.events, (self.now + delay_s, self.num_events, event))

    def look(self) -> None:
        gap = self.attend()
        self.steady += 1
        due = self.membership.next_tick(self.now)
        commands = self.membership.tick(self.now)
        if commands:
            assert due <= self.now, f"{commands[0]} was due before {due}: {self.about}"
        pings = 0
        for command in commands:
            if isinstance(command, Start):
                self.start(command.worker_id, command.incarnation)
                continue
            process = self.processes[command.worker_id]
            assert process.key == (command.worker_id, command.incarnation), self.about
            if isinstance(command, Ping):
                pings += 1
                self.ping(process)
            else:
                self.overdue(process, command.reason)
        if self.steady > 50:
            self.most_pings = max(self.most_pings, pings)
        self.check(gap)

    def attend(self) -> float:
        """Keep attended time: any event is a look of sorts. Returns the time since the last."""
        gap, self.looked_at = self.now - self.looked_at, self.now
        self.attended += min(gap, PAUSE_S)
        return gap

    def start(self, worker_id: int, incarnation: int) -> None:
        assert worker_id not in self.processes, f"a second process in {worker_id}: {self.about}"
        assert incarnation > self.newest[worker_id], f"{worker_id} again: {self.about}"
        assert worker_id not in self.left, f"{worker_id} left: {self.about}"
        assert worker_id not in self.no_place, f"no place for {worker_id}: {self.about}"
        self.newest[worker_id] = incarnation
        self.awaited.pop(worker_id, None)
        self.starts[worker_id] += 1
        assert self.starts[worker_id] <= self.max_restarts + 1, f"{worker_id}: {self.about}"
        process = self.processes[worker_id] = Process(worker_id, incarnation)
        process.join_by = self.attended + START_S
        self.counts["starts"] += 1
        kind = self.rng.random()
        if kind < 0.1:
            self.later(self.rng.uniform(0, 3), lambda: self.die(process))
        elif kind < 0.9:
            self.later(self.rng.uniform(1, 20), lambda: self.join(process))
        else:
            self.counts["hangs"] += 1

    def ping(self, process: Process) -> None:
        assert process.joined, f"{process.key} was not ready: {self.about}"
        process.pinged_at = self.attended
        if process.alive and not process.silent:
            self.later(self.rng.uniform(0, 1), lambda: self.answer(process))

    def overdue(self, process: Process, reason: str) -> None:
        about = f"{process.key}, {reason}: {self.about}"
        if "no sign of life" in reason:
            self.counts["silent"] += 1
            assert process.silent or not process.alive, about
            assert self.attended - process.heard_at >= SILENCE_S - 1e-6, about
        elif "leave" in reason:
            self.counts["leave too slowly"] += 1
            assert self.attended >= process.leave_by - 1e-6, about
        else:
            self.counts["join too slowly"] += 1
            assert not process.joined, about
            assert self.attended >= process.join_by - 1e-6, about
        self.end(process)

    def check(self, gap: float) -> None:
        """What has to hold after each look."""
        states = self.membership.states
        for worker_id, state in states.items():
            old = self.states.get(worker_id)
            if old is not None and old is not state:
                self.arrow(worker_id, old, state)
        self.states = states
        if self.rng.random() > 0.1:
            return
        slack = min(gap, PAUSE_S) + 1e-6
        for worker_id, process in self.processes.items():
            about = f"{process.key}: {self.about}"
            if process.joined:
                silent_s = self.attended - process.heard_at
                assert silent_s < SILENCE_S, f"silent for {silent_s} {about}"
                if abs(silent_s - SILENCE_S / 2) > 1e-6:
                    suspected = states[worker_id] is State.SUSPECTED
                    assert suspected == (silent_s > SILENCE_S / 2), about
                assert self.attended - process.pinged_at <= PAUSE_S + slack, f"not asked {about}"
            else:
                assert self.attended < process.join_by, f"joins for long {about}"
            assert self.attended < process.leave_by, f"leaves for long {about}"
        for worker_id, by in self.awaited.items():
            assert self.now < by, f"{worker_id} is not replaced: {self.about}"
        for worker_id in self.left:
            assert worker_id in self.processes or states[worker_id] is State.LEFT, self.about

    def arrow(self, worker_id: int, old: State, new: State) -> None:
        """Check a change of state; between two looks more than one may have happened."""
        self.counts[f"{old.value} to {new.value}"] += 1
        steps = {old}
        for _ in range(4):
            steps |= {b for a, b in ARROWS if a in steps}
        assert (old, new) in ARROWS or new in steps, f"{worker_id}, {old} to {new}: {self.about}"

    # What happens to processes.

    def join(self, process: Process) -> None:
        if not process.alive:
            return
        worker_id = process.key[0]
        before = self.membership.state(worker_id)
        self.membership.ready(*process.key, self.now)
        if self.processes.get(worker_id) is process:
            assert before is State.JOINING
            assert self.membership.state(worker_id) is State.READY, self.about
            process.joined = True
            self.heard(process)
            process.pinged_at = self.attended
            self.ready_at[worker_id] = self.now

    def answer(self, process: Process) -> None:
        before = self.membership.state(process.key[0])
        self.membership.heard(*process.key, self.now)
        now = self.membership.state(process.key[0])
        if self.processes.get(process.key[0]) is process:
            assert now is State.READY, self.about
            self.heard(process)
        else:
            assert now is before, f"a stale answer of {process.key} counts: {self.about}"

    def heard(self, process: Process) -> None:
        self.attend()
        process.heard_at = self.attended

    def die(self, process: Process) -> None:
        if process.alive and self.processes.get(process.key[0]) is process:
            self.counts["deaths"] += 1
            self.later(self.rng.choice([0, 0.01, 1]), lambda: self.end(process))
            process.alive = False

    def end(self, process: Process) -> None:
        worker_id = process.key[0]
        current = self.processes.get(worker_id) is process
        assert self.membership.ended(*process.key, self.now) == current, self.about
        if not current:
            return
        process.alive = False
        del self.processes[worker_id]
        self.past.append(process.key)
        if self.now - self.ready_at.pop(worker_id, self.now) >= 60:
            self.starts[worker_id] = 1
            self.counts["sound"] += 1
        state = self.membership.state(worker_id)
        if worker_id in self.left:
            assert state is State.LEFT, self.about
        elif worker_id in self.no_place or self.starts[worker_id] > self.max_restarts:
            assert state is State.LOST, self.about
        else:
            assert state is State.JOINING, f"{process.key} is not replaced: {self.about}"
            # The longest of pauses, and the longest time that the trainer doesn't look.
            self.awaited[worker_id] = self.now + 30.0 + 1100.0
            delay = self.membership.delay(worker_id, self.now)
            assert delay is not None
            assert delay <= 30.0

    def open(self, worker_id: int) -> None:
        gone = self.membership.state(worker_id) in (State.LOST, State.LEFT)
        self.membership.open(worker_id, self.now)
        self.no_place.discard(worker_id)
        if gone and worker_id not in self.processes:
            assert self.membership.state(worker_id) is State.JOINING, self.about
            self.left.discard(worker_id)
            self.starts[worker_id] = 0
            self.awaited[worker_id] = self.now + 1100.0

    def fault(self) -> None:
        """Something happens to some slot."""
        worker_id = self.rng.randrange(self.num_slots)
        process = self.processes.get(worker_id)
        faults: list[Callable[[int], None]] = [self.lose_place, self.open, self.leave]
        if process is None:
            faults.append(self.stale)
        else:
            faults += [lambda _: self.die(process), lambda _: self.mute(process)] * 2
            faults.append(lambda _: self.answer_twice(process))
        self.rng.choice(faults)(worker_id)
        self.later(self.rng.expovariate(self.num_slots / 100), self.fault)

    def lose_place(self, worker_id: int) -> None:
        self.membership.lose_place(worker_id)
        self.no_place.add(worker_id)
        if worker_id not in self.processes:
            self.awaited.pop(worker_id, None)
            assert self.membership.state(worker_id) in (State.LOST, State.LEFT), self.about
        self.later(self.rng.uniform(0, 60), lambda: self.open(worker_id))

    def leave(self, worker_id: int) -> None:
        within_s = self.rng.uniform(1, 30)
        self.membership.leave(worker_id, within_s, self.now)
        process = self.processes.get(worker_id)
        if process is None:
            self.awaited.pop(worker_id, None)
        elif worker_id not in self.left:
            self.attend()
            process.join_by = process.leave_by = self.attended + within_s
            if self.rng.random() < 0.7:
                self.later(self.rng.uniform(0, 20), lambda: self.die(process))
        self.left.add(worker_id)
        self.later(self.rng.uniform(30, 100), lambda: self.open(worker_id))

    def stale(self, _: int) -> None:
        """Something is heard of a process that has ended."""
        if not self.past:
            return
        key = self.rng.choice(self.past[-1000:])
        state = self.membership.state(key[0])
        self.membership.ready(*key, self.now)
        self.membership.heard(*key, self.now)
        assert not self.membership.ended(*key, self.now), self.about
        assert self.membership.state(key[0]) is state, self.about

    def mute(self, process: Process) -> None:
        self.counts["mute"] += 1
        process.silent = True

    def answer_twice(self, process: Process) -> None:
        if process.joined and process.alive and not process.silent:
            self.answer(process)


@pytest.mark.parametrize(("seed", "num_slots"), [(0, 1), (1, 10), (2, 100), (3, 1000), (4, 3000)])
def test_random_faults(seed: int, num_slots: int) -> None:
    num_events = {1: 2_000, 10: 20_000, 100: 80_000, 1000: 400_000, 3000: 500_000}[num_slots]
    run = Simulation(seed, num_slots).run(num_events)
    if num_slots >= 10:
        for kind in ("deaths", "hangs", "silent", "absences", "leave too slowly", "sound"):
            assert run.counts[kind], f"no {kind}, {run.counts}: {run.about}"
        assert {state for state in State if any(state.value in kind for kind in run.counts)} == {
            *State
        }
    if num_slots >= 1000:
        # Fewer than a third of all are asked at one look, at most 0.4 s after the last.
        assert run.most_pings < num_slots / 3, f"{run.most_pings} at once: {run.about}"


def test_pings_are_spread_from_the_start() -> None:
    membership = make()
    for worker_id in range(1000):
        membership.open(worker_id, 0.0)
    membership.tick(0.0)
    for worker_id in range(1000):
        membership.ready(worker_id, 0, 0.0)
    request: Counter[int] = Counter()
    for step in range(500):
        now = step / 100
        for command in membership.tick(now):
            request[step // 10] += 1
            membership.heard(command.worker_id, command.incarnation, now)
    assert sum(request.values()) >= 2 * 1000
    assert max(request.values()) < 150, "in a tenth of a second"
