"""Membership under thousands of simulated processes that fail in every way."""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from heapq import heappop, heappush

import pytest

from distcollect.config import Faults
from distcollect.errors import FIRST_SERVER
from distcollect.results import WorkerState
from distcollect.roster.membership import (
    Membership,
    MembershipCommand,
    Overdue,
    Ping,
    Start,
    WorkerPhase,
)

SILENCE_S = 8.0
START_S = 100.0
PAUSE_S = 2.0


def make(max_restarts: int = 3, seed: int = 0) -> Membership:
    return Membership(SILENCE_S, START_S, max_restarts, rng=random.Random(seed))


class Process:
    """A simulated worker process."""

    def __init__(self, worker_id: int, incarnation: int) -> None:
        self.key = (worker_id, incarnation)
        self.alive = True
        self.silent = False
        self.joined = False
        self.pinged_at = 0.0  # in time that the trainer was attentive
        self.asked_at = math.inf  # the same, by the first ping that was not answered
        self.leave_by = math.inf
        self.join_by = math.inf


class Simulation:
    """Thousands of processes that fail in every way, and a trainer that ticks now and then."""

    def __init__(self, seed: int, num_slots: int) -> None:
        self.about = f"seed {seed}, {num_slots} slots"
        self.rng = random.Random(seed)
        self.max_restarts = (12, 0, 2)[seed % 3]
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
        self.states: dict[int, WorkerState] = {}
        self.left: set[int] = set()  # told to leave, and not opened again
        self.closed: set[int] = set()
        self.starts: Counter[int] = Counter()
        self.ready_at: dict[int, float] = {}
        self.delays: set[float] = set()  # before the next process of a slot
        self.awaited: dict[int, float] = {}  # slots to be filled, with their deadlines
        self.counts: Counter[str] = Counter()
        self.most_pings = 0
        self.steady = 0  # ticks since the last absence

    # Actions of the trainer.

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
        """Advance attended time, which each event does; return the time since the last event."""
        gap, self.looked_at = self.now - self.looked_at, self.now
        self.attended += min(gap, PAUSE_S)
        return gap

    def start(self, worker_id: int, incarnation: int) -> None:
        assert worker_id not in self.processes, f"a second process in {worker_id}: {self.about}"
        assert incarnation > self.newest[worker_id], f"{worker_id} again: {self.about}"
        assert worker_id not in self.left, f"{worker_id} left: {self.about}"
        assert worker_id not in self.closed, f"slot {worker_id} is closed: {self.about}"
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
        process.asked_at = min(process.asked_at, self.attended)
        if process.alive and not process.silent:
            self.later(self.rng.uniform(0, 1), lambda: self.answer(process))

    def overdue(self, process: Process, reason: str) -> None:
        about = f"{process.key}, {reason}: {self.about}"
        if "no sign of life" in reason:
            self.counts["silent"] += 1
            assert process.silent or not process.alive, about
            assert self.attended - process.asked_at >= SILENCE_S - 1e-6, about
        elif "leave" in reason:
            self.counts["leave too slowly"] += 1
            assert self.attended >= process.leave_by - 1e-6, about
        else:
            self.counts["join too slowly"] += 1
            assert not process.joined, about
            assert self.attended >= process.join_by - 1e-6, about
        self.end(process)

    def check(self, gap: float) -> None:
        """Check what must hold after each tick."""
        states = self.membership.states
        for worker_id, state in states.items():
            old = self.states.get(worker_id)
            if old is not None and old is not state:
                self.counts[f"{old.value} to {state.value}"] += 1
        self.states = states
        gone = (WorkerState.LOST, WorkerState.LEFT)
        hopeful = sum(state not in gone for state in states.values())
        assert self.membership.num_hopeful == hopeful, self.about
        if self.rng.random() > 0.1:
            return
        slack = min(gap, PAUSE_S) + 1e-6
        for worker_id, process in self.processes.items():
            about = f"{process.key}: {self.about}"
            if process.joined:
                silent_s = self.attended - process.asked_at
                assert silent_s < SILENCE_S, f"silent for {silent_s} {about}"
                if abs(silent_s - SILENCE_S / 2) > 1e-6:
                    suspected = states[worker_id] is WorkerState.SUSPECTED
                    assert suspected == (silent_s > SILENCE_S / 2), about
                assert self.attended - process.pinged_at <= PAUSE_S + slack, f"not asked {about}"
            else:
                assert self.attended < process.join_by, f"joins for long {about}"
            assert self.attended < process.leave_by, f"leaves for long {about}"
        for worker_id, by in self.awaited.items():
            assert self.now < by, f"{worker_id} is not replaced: {self.about}"
        for worker_id in self.left:
            assert worker_id in self.processes or states[worker_id] is WorkerState.LEFT, self.about

    # Events of processes.

    def join(self, process: Process) -> None:
        if not process.alive:
            return
        worker_id = process.key[0]
        before = self.membership.state(worker_id)
        self.membership.ready(*process.key, self.now)
        if self.processes.get(worker_id) is process:
            assert before is WorkerState.JOINING
            assert self.membership.state(worker_id) is WorkerState.READY, self.about
            process.joined = True
            self.heard(process)
            process.pinged_at = self.attended
            self.ready_at[worker_id] = self.now

    def answer(self, process: Process) -> None:
        before = self.membership.state(process.key[0])
        self.membership.heard(*process.key, self.now)
        now = self.membership.state(process.key[0])
        if self.processes.get(process.key[0]) is process:
            assert now is WorkerState.READY, self.about
            self.heard(process)
        else:
            assert now is before, f"a stale answer of {process.key} counts: {self.about}"

    def heard(self, process: Process) -> None:
        self.attend()
        process.asked_at = math.inf

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
            assert state is WorkerState.LEFT, self.about
        elif worker_id in self.closed or self.starts[worker_id] > self.max_restarts:
            assert state is WorkerState.LOST, self.about
        else:
            assert state is WorkerState.JOINING, f"{process.key} is not replaced: {self.about}"
            # The longest pause, and the longest time without a tick.
            self.awaited[worker_id] = self.now + 30.0 + 1100.0
            delay = self.membership.delay(worker_id, self.now)
            assert delay is not None
            in_a_row = self.starts[worker_id]
            longest = 0.0 if in_a_row < 2 else min(0.5 * 2 ** (in_a_row - 2), 30.0)
            assert 0.75 * longest <= delay <= longest, f"{process.key} waits {delay}: {self.about}"
            assert not delay or delay not in self.delays, "who fails together would come together"
            self.delays.add(delay)

    def open(self, worker_id: int) -> None:
        gone = self.membership.state(worker_id) in (WorkerState.LOST, WorkerState.LEFT)
        self.membership.open(worker_id, self.now)
        self.closed.discard(worker_id)
        if gone and worker_id not in self.processes:
            assert self.membership.state(worker_id) is WorkerState.JOINING, self.about
            self.left.discard(worker_id)
            self.starts[worker_id] = 0
            self.awaited[worker_id] = self.now + 1100.0

    def fault(self) -> None:
        """Let a random event happen to a random slot."""
        worker_id = self.rng.randrange(self.num_slots)
        process = self.processes.get(worker_id)
        faults: list[Callable[[int], None]] = [self.close, self.open, self.leave]
        if process is None:
            faults.append(self.stale)
        else:
            faults += [lambda _: self.die(process), lambda _: self.mute(process)] * 2
            faults.append(lambda _: self.answer_twice(process))
        self.rng.choice(faults)(worker_id)
        self.later(self.rng.expovariate(self.num_slots / 100), self.fault)

    def close(self, worker_id: int) -> None:
        self.membership.close(worker_id)
        self.closed.add(worker_id)
        if worker_id not in self.processes:
            self.awaited.pop(worker_id, None)
            assert self.membership.state(worker_id) in (WorkerState.LOST, WorkerState.LEFT), (
                self.about
            )
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
        """A message arrives from a process that has ended."""
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


@pytest.mark.parametrize(
    ("seed", "num_slots", "num_events"),
    [
        (0, 1, 2_000),
        (1, 10, 20_000),
        (2, 100, 30_000),
        (3, 1000, 150_000),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((2, 100, 80_000), (3, 1000, 400_000), (4, 3000, 500_000))
        ),
    ],
)
def test_random_faults(seed: int, num_slots: int, num_events: int) -> None:
    run = Simulation(seed, num_slots).run(num_events)
    if num_slots >= 10:
        for kind in ("deaths", "hangs", "silent", "absences", "leave too slowly", "sound"):
            assert run.counts[kind], f"no {kind}, {run.counts}: {run.about}"
        assert {
            state for state in WorkerState if any(state.value in kind for kind in run.counts)
        } == {*WorkerState}
    if num_slots >= 1000:
        # One tick, at most 0.4 s after the last, pings fewer than a third of all.
        assert run.most_pings < num_slots / 3, f"{run.most_pings} at once: {run.about}"


def working(now: float = 0.0, **settings: int) -> Membership:
    """A membership with one slot, whose first process is ready."""
    membership = make(**settings)
    membership.open(0, now)
    assert membership.tick(now) == [Start(0, 0)]
    membership.ready(0, 0, now)
    return membership


def watch(
    membership: Membership, now: float, until: float
) -> list[tuple[float, MembershipCommand]]:
    """Do what ``tick`` says whenever it is due, until ``until``; return the commands."""
    said: list[tuple[float, MembershipCommand]] = []
    looks_without_a_word = 0
    while (due := membership.next_tick(now)) <= until:
        now = max(now, due)
        commands = membership.tick(now)
        said += [(now, command) for command in commands]
        for command in commands:
            if isinstance(command, Overdue):
                membership.ended(command.worker_id, command.incarnation, now)
        looks_without_a_word = 0 if commands else looks_without_a_word + 1
        assert looks_without_a_word < 1000, "it gets nowhere"
    assert membership.tick(until) == []
    return said


def test_commands_come_in_the_order_in_which_they_were_due() -> None:
    membership = make()
    for worker_id, at in [(0, 5.0), (1, 3.0), (2, 4.0), (3, 3.0)]:
        membership.open(worker_id, at)
    membership.close(2)
    assert membership.next_tick(0.0) == 3.0
    assert membership.tick(9.0) == [Start(1, 0), Start(3, 0), Start(0, 0)]


@pytest.mark.parametrize("seed", range(20))
def test_a_network_that_stands_still_for_5_s_costs_no_worker(seed: int) -> None:
    """TCP waits longer before each try, so it may go on only 8.4 s after the network stood still.

    It does if its tries are 0.21 s, then twice as long apart: the last within the pause is at 4.99
    s, and the next at 8.2 s, after what was sent first.
    """
    silence_s = Faults().silence_timeout_s
    membership = Membership(silence_s, START_S, 0, rng=random.Random(seed))
    membership.open(0, 0.0)
    membership.tick(0.0)
    membership.ready(0, 0, 0.0)
    stands_at, goes_on_at, now = 20.0 + seed / 10, 20.0 + seed / 10 + 8.4, 0.0
    while (due := membership.next_tick(now)) < goes_on_at:
        now = max(now, due)
        for command in membership.tick(now):
            assert command == Ping(0, 0), f"after {now - stands_at} s"
            if now < stands_at:
                membership.heard(0, 0, now)
    membership.heard(0, 0, goes_on_at)
    assert membership.state(0) is WorkerState.READY
    # Who never answers is lost, not much later than the timeout.
    [*_, (when, overdue)] = watch(membership, goes_on_at, goes_on_at + 1.3 * silence_s)
    assert isinstance(overdue, Overdue)
    assert when <= goes_on_at + 1.25 * silence_s


def test_a_server_is_no_worker_and_is_given_up_only_while_its_slot_is_open() -> None:
    membership = make()
    server = FIRST_SERVER
    membership.open(server, 0.0)
    assert (membership.states, membership.num_hopeful) == ({}, 0)
    now, incarnation = 0.0, 0
    while not membership.is_given_up(server):
        now = max(now, membership.next_tick(now))
        assert membership.tick(now) == [Start(server, incarnation)]
        assert membership.ended(server, incarnation, now)
        incarnation += 1
    assert incarnation == 1 + membership.max_restarts
    membership.open(server, now)
    assert membership.tick(now) == [Start(server, incarnation)]
    membership.close(server)
    assert membership.ended(server, incarnation, now)
    assert membership.phase(server) is WorkerPhase.LOST
    assert not membership.is_given_up(server), "its host is gone"


def test_a_process_that_ends_in_order_is_watched_until_it_has_ended() -> None:
    membership = working()
    assert not membership.drained(0, 0, 5.0, 1.0)
    assert membership.drain(0, 0)
    assert not membership.drain(0, 0)
    pings = [command for _, command in watch(membership, 1.0, 3.0)]
    assert pings == [Ping(0, 0)] * len(pings) != [], "it may take long to deliver its rollout"
    membership.heard(0, 0, 3.0)
    assert membership.drained(0, 0, 5.0, 3.0)
    assert (membership.phase(0), membership.state(0)) == (WorkerPhase.EXITING, WorkerState.READY)
    said = watch(membership, 3.0, 9.0)
    when, overdue = next(each for each in said if isinstance(each[1], Overdue))
    assert isinstance(overdue, Overdue)
    assert when == pytest.approx(8.0)
    assert "took too long" in overdue.reason
    assert membership.state(0) is WorkerState.JOINING, "it was retired, and is replaced"
