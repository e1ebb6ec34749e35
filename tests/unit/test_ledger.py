"""The account of all frames: each rule by itself, then all rules in a simulated run."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial

import pytest

from distcollect.pool.ledger import Ledger
from distcollect.results import Frames

FRAMES = 10


def announced(*sequences: int, stepped: int = 0, lost: dict[str, int] | None = None) -> Ledger:
    """Register ready rollouts of worker 3's first process."""
    ledger = Ledger()
    for sequence in sequences:
        so_far = (sequence + 1) * FRAMES
        ledger.announce(3, 0, sequence, FRAMES, stepped=max(stepped, so_far), lost=lost or {})
    return ledger


def test_nothing_has_happened_yet() -> None:
    report = Ledger().report()
    assert report.workers == {}
    assert report.total == Frames()


def test_a_rollout_is_open_until_it_is_delivered() -> None:
    ledger = announced(0, 1)
    assert ledger.report().total == Frames(stepped=20, open=20)
    ledger.deliver(3, 0, 1)
    assert ledger.report().total == Frames(stepped=20, delivered=10, open=10)
    ledger.lose(3, 0, 0, "stale")
    frames = Frames(stepped=20, delivered=10, lost={"stale": 10})
    assert ledger.report().total == frames
    assert ledger.report().workers == {3: frames}


def test_what_a_process_says_it_lost_counts_once() -> None:
    ledger = announced(0, stepped=14, lost={"env_failed": 4})
    ledger.announce(3, 0, 1, FRAMES, stepped=30, lost={"env_failed": 6, "row_skew": 1})
    assert ledger.report().total == Frames(
        stepped=30, lost={"env_failed": 6, "row_skew": 1}, open=23
    )


def test_env_faults_of_all_processes_of_a_worker() -> None:
    ledger = Ledger()
    ledger.announce(3, 0, 0, FRAMES, stepped=FRAMES, lost={}, env_faults=2)
    ledger.announce(3, 0, 1, FRAMES, stepped=2 * FRAMES, lost={}, env_faults=3)
    ledger.env_failed(3, 0, 5)
    ledger.lose_waiting("shut_down")
    ledger.end(3, 0, "worker_lost", stepped=2 * FRAMES)
    ledger.env_failed(3, 0, 9)  # it is settled
    ledger.announce(3, 1, 0, FRAMES, stepped=FRAMES, lost={}, env_faults=1)
    report = ledger.report()
    assert report.workers[3].env_faults == report.total.env_faults == 6
    assert str(report).splitlines()[0].endswith("env faults")
    assert str(report).splitlines()[-1].endswith(" 6")
    assert "env faults" not in str(announced(0).report())


@pytest.mark.parametrize("settle", ["deliver", "lose"])
@pytest.mark.parametrize("ended", [True, False])
def test_a_rollout_is_settled_once(settle: str, *, ended: bool) -> None:
    ledger = announced(0, 1)
    ledger.deliver(3, 0, 0)
    if ended:
        ledger.end(3, 0, "worker_lost", stepped=25)
        ledger.lose(3, 0, 1, "worker_lost")
    before = ledger.report()
    again = partial(ledger.deliver, 3, 0, 0)
    if settle == "lose":
        again = partial(ledger.lose, 3, 0, 0, "stale")
    with pytest.raises(KeyError):
        again()
    assert ledger.report() == before


@pytest.mark.parametrize("sequence", [0, 1, 3])
def test_rollouts_are_announced_in_their_order_and_once(sequence: int) -> None:
    ledger = announced(0, 1)
    before = ledger.report()
    with pytest.raises(
        ValueError,
        match=f"worker 3, incarnation 0: rollout {sequence} was announced, but 2 is next",
    ):
        ledger.announce(3, 0, sequence, FRAMES, stepped=99, lost={"x": 1})
    assert ledger.report() == before


@pytest.mark.parametrize("incarnation", [0, 2])
@pytest.mark.parametrize("waits", [True, False])
def test_nothing_more_comes_of_a_process_that_has_ended(incarnation: int, *, waits: bool) -> None:
    """Also if an earlier process, or one of its own rollouts, is still open."""
    ledger = Ledger()
    ledger.announce(3, incarnation, 0, FRAMES, stepped=15, lost={})
    if not waits:
        ledger.deliver(3, incarnation, 0)
    ledger.end(3, incarnation, "worker_lost", stepped=17)
    before = ledger.report()
    for sequence in (0, 1):
        with pytest.raises(ValueError, match="none is next"):
            ledger.announce(3, incarnation, sequence, FRAMES, stepped=99, lost={})
    ledger.end(3, incarnation, "left", stepped=99)
    ledger.end(3, incarnation, "left", stepped=None, at_most=5)
    assert ledger.report() == before
    assert before.total.stepped == 17


def test_what_nobody_heard_of_is_lost_when_its_process_ends() -> None:
    ledger = announced(0, stepped=14, lost={"env_failed": 4})
    ledger.end(3, 0, "worker_lost", stepped=21)
    assert ledger.report().total == Frames(
        stepped=21, lost={"env_failed": 4, "worker_lost": 7}, open=10
    )
    ledger.deliver(3, 0, 0)
    assert ledger.report().total == Frames(
        stepped=21, delivered=10, lost={"env_failed": 4, "worker_lost": 7}
    )


def test_a_process_may_end_before_anything_was_heard_of_it() -> None:
    ledger = Ledger()
    ledger.end(0, 0, "worker_lost", stepped=3)
    ledger.end(1, 0, "worker_lost", stepped=None, at_most=FRAMES)
    assert ledger.report().workers == {
        0: Frames(stepped=3, lost={"worker_lost": 3}),
        1: Frames(at_most=FRAMES),
    }


def test_only_of_a_host_that_vanished_it_is_not_known_exactly() -> None:
    ledger = announced(0, stepped=12)
    ledger.end(3, 0, "worker_lost", stepped=None, at_most=FRAMES)
    frames = Frames(stepped=12, lost={"worker_lost": 2}, open=10, at_most=FRAMES)
    assert ledger.report().total == frames
    known = announced(0, stepped=12)
    known.end(3, 0, "worker_lost", stepped=12, at_most=FRAMES)
    assert known.report().total.at_most == 0


def test_processes_of_a_slot_are_summed_up() -> None:
    ledger = announced(0)
    ledger.end(3, 0, "worker_lost", stepped=15)
    ledger.announce(3, 1, 0, FRAMES, stepped=12, lost={})
    ledger.deliver(3, 1, 0)
    ledger.deliver(3, 0, 0)
    ledger.announce(0, 0, 0, FRAMES, stepped=10, lost={})
    report = ledger.report()
    assert list(report.workers) == [0, 3]
    assert report.workers[3] == Frames(stepped=27, delivered=20, lost={"worker_lost": 5}, open=2)
    assert report.total == Frames(stepped=37, delivered=20, lost={"worker_lost": 5}, open=12)


def test_all_that_waits_may_be_lost_at_once() -> None:
    ledger = announced(0, 1)
    ledger.end(3, 0, "worker_lost", stepped=20)
    ledger.announce(3, 1, 0, FRAMES, stepped=12, lost={})
    ledger.lose_waiting("shut_down")
    assert ledger.report().total == Frames(stepped=32, lost={"shut_down": 30}, open=2)
    with pytest.raises(KeyError):
        ledger.deliver(3, 1, 0)
    ledger.end(3, 1, "shut_down", stepped=12)
    assert ledger.report().total == Frames(stepped=32, lost={"shut_down": 32})


def test_the_report_is_a_table() -> None:
    ledger = Ledger()
    for sequence in range(300):
        ledger.announce(0, 0, sequence, FRAMES, stepped=(sequence + 1) * FRAMES, lost={})
        ledger.deliver(0, 0, sequence)
    ledger.announce(11, 0, 0, FRAMES, stepped=12, lost={"row_skew": 2})
    assert str(ledger.report()).splitlines() == [
        "worker  stepped  delivered  lost: row_skew  open",
        "     0    3,000      3,000               0     0",
        "    11       12          0               2    10",
        "   all    3,012      3,000               2    10",
    ]
    ledger.end(11, 0, "worker_lost", stepped=None, at_most=1234)
    assert str(ledger.report()).splitlines() == [
        "worker  stepped  delivered  lost: row_skew  open  at most more",
        "     0    3,000      3,000               0     0             0",
        "    11       12          0               2    10         1,234",
        "   all    3,012      3,000               2    10         1,234",
    ]


class Process:
    """A simulated worker process: what it did, and what it reported."""

    def __init__(self, worker_id: int, incarnation: int) -> None:
        self.key = (worker_id, incarnation)
        self.stepped = 0
        self.begun = 0  # frames of its unfinished rollout
        self.own_losses: Counter[str] = Counter()
        self.num_rollouts = 0
        self.waiting: dict[int, int] = {}
        self.known = 0  # the frames that it reported as stepped
        self.known_losses: Counter[str] = Counter()
        self.settled = 0  # known frames that were delivered or lost


class Simulation:
    """Processes that step, report, fail and die at random; and the expected account."""

    def __init__(self, seed: int, num_slots: int) -> None:
        self.about = f"seed {seed}, {num_slots} slots"
        self.rng = random.Random(seed)
        self.ledger = Ledger()
        self.running = [Process(worker_id, 0) for worker_id in range(num_slots)]
        self.ended: list[Process] = []  # and not yet accounted for
        self.over: list[tuple[int, int]] = []
        self.waiting: list[tuple[Process, int]] = []
        self.settled: list[tuple[int, int, int]] = []
        self.stepped, self.delivered, self.at_most = (
            [0] * num_slots,
            [0] * num_slots,
            [0] * num_slots,
        )
        self.lost: list[Counter[str]] = [Counter() for _ in range(num_slots)]
        self.really_stepped = self.hidden = 0

    def run(self, num_events: int) -> Simulation:
        often = [self.step, self.announce, self.settle] * 8
        for number in range(num_events):
            self.rng.choice([*often, self.fail, self.die, self.account, self.again])()
            self.check()
            if number % 50 == 0:
                self.check_table()
        for process in self.running:
            self.ended.append(process)
        while self.ended:
            self.account()
            self.check()
        while self.waiting:
            self.settle()
            self.check()
        self.check_table()
        total = self.ledger.report().total
        assert total.open == 0, self.about
        assert total.stepped == self.really_stepped - self.hidden, self.about
        assert self.hidden <= total.at_most, self.about
        assert not self.ledger._processes, self.about
        assert all(not settled._above for settled in self.ledger._settled.values()), self.about
        return self

    def step(self) -> None:
        process = self.rng.choice(self.running)
        frames = self.rng.randint(1, 8)
        process.stepped += frames
        process.begun += frames
        self.really_stepped += frames

    def fail(self) -> None:
        """An env raises: its unfinished frames are in no rollout."""
        process = self.rng.choice(self.running)
        process.own_losses[self.rng.choice(["env_failed", "row_skew"])] += process.begun
        process.begun = 0

    def announce(self) -> None:
        process = self.rng.choice(self.running)
        if not process.begun or len(process.waiting) > 2:
            return
        # Some frames may be left over for the next rollout.
        frames = self.rng.randint(1, process.begun)
        sequence = process.num_rollouts
        losses = dict(process.own_losses)
        self.ledger.announce(*process.key, sequence, frames, stepped=process.stepped, lost=losses)
        process.begun -= frames
        process.num_rollouts += 1
        process.waiting[sequence] = frames
        self.waiting.append((process, sequence))
        self.learn(process, process.stepped)
        for cause, count in (process.own_losses - process.known_losses).items():
            self.lose(process, cause, count)
        process.known_losses = process.own_losses.copy()

    def learn(self, process: Process, stepped: int) -> None:
        self.stepped[process.key[0]] += stepped - process.known
        process.known = stepped

    def lose(self, process: Process, cause: str, frames: int) -> None:
        self.lost[process.key[0]][cause] += frames
        process.settled += frames

    def settle(self) -> None:
        if not self.waiting:
            return
        process, sequence = self.waiting.pop(self.rng.randrange(len(self.waiting)))
        frames = process.waiting.pop(sequence)
        if self.rng.random() < 0.7:
            self.ledger.deliver(*process.key, sequence)
            self.delivered[process.key[0]] += frames
            process.settled += frames
        else:
            cause = self.rng.choice(["stale", "given_up"])
            self.ledger.lose(*process.key, sequence, cause)
            self.lose(process, cause, frames)
        self.settled = [*self.settled[-50:], (*process.key, sequence)]

    def die(self) -> None:
        index = self.rng.randrange(len(self.running))
        worker_id, incarnation = self.running[index].key
        self.ended.append(self.running[index])
        self.running[index] = Process(worker_id, incarnation + 1)

    def account(self) -> None:
        """Account for a process, perhaps only after the one that replaced it."""
        if not self.ended:
            return
        process = self.ended.pop(self.rng.randrange(len(self.ended)))
        worker_id = process.key[0]
        cause = self.rng.choice(["worker_lost", "left", "hung"])
        unknown = process.stepped - process.known
        if self.rng.random() < 0.8:
            self.ledger.end(*process.key, cause, stepped=process.stepped, at_most=1000)
            self.learn(process, process.stepped)
        else:
            at_most = unknown + self.rng.choice([0, 5])
            self.ledger.end(*process.key, cause, stepped=None, at_most=at_most)
            self.at_most[worker_id] += at_most
            self.hidden += unknown
        self.lose(process, cause, process.known - process.settled - sum(process.waiting.values()))
        self.over = [*self.over[-50:], process.key]

    def again(self) -> None:
        """Events for a settled rollout or a closed process are refused."""
        if self.settled:
            key = self.rng.choice(self.settled)
            with pytest.raises(KeyError):
                self.ledger.deliver(*key)
            with pytest.raises(KeyError):
                self.ledger.lose(*key, "stale")
        if self.over:
            ended = self.rng.choice(self.over)
            with pytest.raises(ValueError, match="was announced"):
                self.ledger.announce(*ended, 0, 1, stepped=1, lost={})
            self.ledger.end(*ended, "left", stepped=10**6)
            self.ledger.end(*ended, "left", stepped=None, at_most=10**6)
        process = self.rng.choice(self.running)
        for sequence in {0, process.num_rollouts - 1, process.num_rollouts + 1}:
            if 0 <= sequence != process.num_rollouts:
                with pytest.raises(ValueError, match="was announced"):
                    self.ledger.announce(*process.key, sequence, 1, stepped=1, lost={})

    def check(self) -> None:
        report = self.ledger.report()
        for worker_id, frames in report.workers.items():
            about = f"worker {worker_id}: {self.about}"
            lost = +self.lost[worker_id]
            settled = self.delivered[worker_id] + lost.total()
            open_frames = self.stepped[worker_id] - settled
            assert frames == Frames(
                self.stepped[worker_id],
                self.delivered[worker_id],
                lost,
                open_frames,
                self.at_most[worker_id],
            ), about
            assert frames.stepped == frames.delivered + sum(frames.lost.values()) + frames.open
            assert min(frames.stepped, frames.delivered, *frames.lost.values(), frames.open) >= 0, (
                about
            )
        total = report.total
        assert total.stepped == sum(self.stepped), self.about
        assert total.delivered == sum(self.delivered), self.about
        assert total.lost == +sum(self.lost, Counter()), self.about
        assert total.at_most == sum(self.at_most), self.about
        assert total.stepped == total.delivered + sum(total.lost.values()) + total.open, self.about
        awaited = {process.key for process in self.running + self.ended}
        awaited |= {process.key for process, _ in self.waiting}
        assert self.ledger._processes.keys() <= awaited, f"the dead are kept: {self.about}"

    def check_table(self) -> None:
        """It takes much longer to make than all else here."""
        report = self.ledger.report()
        rows = str(report).splitlines()
        assert len(rows) == 2 + len(report.workers), self.about
        assert len({len(row) for row in rows}) == 1, f"not aligned: {self.about}"


@pytest.mark.parametrize(("seed", "num_slots"), [(0, 1), (1, 2), (2, 7), (3, 30)])
def test_random_deaths(seed: int, num_slots: int) -> None:
    run = Simulation(seed, num_slots).run(4_000 // num_slots + 1_000)
    assert sum(run.at_most) > 0
    dead = sum(process.key[1] for process in run.running)
    assert dead > 20


def test_memory_is_the_same_after_many_deaths() -> None:
    ledger = Ledger()
    for incarnation in range(1000):
        ledger.announce(0, incarnation, 0, FRAMES, stepped=FRAMES, lost={})
        ledger.end(0, incarnation, "worker_lost", stepped=FRAMES + 1)
        assert len(ledger._processes) == 1
        ledger.deliver(0, incarnation, 0)
        assert not ledger._processes
        assert not ledger._settled[0]._above
    assert ledger.report().total == Frames(11_000, 10_000, {"worker_lost": 1000})
