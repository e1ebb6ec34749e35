"""Decisions about staleness: each rule by itself, then all rules in a simulated run."""

from __future__ import annotations

import random
from collections.abc import Callable
from heapq import heappop, heappush

import pytest

from distcollect.config import Staleness
from distcollect.pool.staleness import Pacer, SentVersions, StalenessTicket


def ask(pacer: Pacer, worker_id: int, version: int) -> StalenessTicket:
    ticket = StalenessTicket(worker_id, version)
    pacer.ask(ticket)
    return ticket


def may_ask(pacer: Pacer, worker_id: int, version: int) -> bool:
    """Return True if a worker that has this version may be asked for a rollout."""
    return pacer.slack(worker_id, version) >= pacer.needed_slack()


def is_too_stale(pacer: Pacer, ticket: StalenessTicket) -> bool:
    return pacer.slack(ticket.worker_id, ticket.version) < 0


def choose(pacer: Pacer, arrived: list[StalenessTicket]) -> StalenessTicket | None:
    """The rollout to deliver now; ``arrived`` is in the order of arrival."""
    fresh = [ticket for ticket in arrived if not is_too_stale(pacer, ticket)]
    if not fresh:
        return None
    first = min(fresh, key=lambda ticket: pacer.slack(ticket.worker_id, ticket.version))
    return first if pacer.may_deliver(first) else None


class Trainer:
    """Publish to some workers, and report it to the pacer."""

    def __init__(self, max_policy_lag: int, num_workers: int = 8) -> None:
        self.version = 0
        self.workers = range(num_workers)
        self.versions = SentVersions()
        self.pacer = Pacer(Staleness(max_policy_lag), self.versions)

    def publish(self, *worker_ids: int) -> None:
        self.version += 1
        self.versions.publish(self.version, worker_ids or self.workers)
        self.pacer.published()

    def deliver(self) -> None:
        """Deliver a rollout that concerns no other."""
        self.pacer.delivered(ask(self.pacer, 0, self.version))

    def ask_all(self) -> list[StalenessTicket]:
        """Request as many rollouts with the newest version as allowed."""
        tickets: list[StalenessTicket] = []
        while len(tickets) < 100 and may_ask(self.pacer, len(tickets), self.version):
            tickets.append(ask(self.pacer, len(tickets), self.version))
        return tickets


def habit(max_policy_lag: int, every: int, burst: int = 1) -> Trainer:
    """A trainer that publishes ``burst`` versions after each ``every`` deliveries."""
    trainer = Trainer(max_policy_lag, num_workers=100)
    for _ in range(6):
        for _ in range(every):
            trainer.deliver()
        for _ in range(burst):
            trainer.publish()
    return trainer


def test_lag_counts_what_was_sent_to_the_slot() -> None:
    versions = SentVersions()
    assert (versions.newest(0), versions.lag(0, 0)) == (0, 0)
    versions.publish(1, [0, 1])
    versions.publish(2, [0])
    versions.publish(5, [0, 1])
    versions.publish(5, [1])
    assert [versions.newest(worker_id) for worker_id in range(3)] == [5, 5, 0]
    assert [versions.lag(0, version) for version in range(7)] == [3, 2, 1, 1, 1, 0, 0]
    assert [versions.lag(1, version) for version in range(7)] == [2, 1, 1, 1, 1, 0, 0]
    assert versions.lag(2, 0) == 0
    assert [versions.age(version) for version in range(7)] == [5, 4, 3, 2, 1, 0, 0]
    bounds = Staleness(1), Staleness(max_policy_age=4), Staleness(1, max_policy_age=4)
    assert [versions.slack(bound, 1, 0) for bound in bounds] == [-1, -1, -1]
    assert [versions.slack(bound, 1, 2) for bound in bounds] == [0, 1, 0]
    assert [versions.slack(bound, 2, 0) for bound in bounds] == [1, -1, -1]
    with pytest.raises(ValueError, match="worker 1: version 4 comes after 5"):
        versions.publish(4, [1])


def test_a_worker_lags_by_what_was_sent_to_its_server_also_if_it_moves_to_another_one() -> None:
    server = {0: 10, 1: 10, 2: 11}
    versions = SentVersions(holder=lambda slot: server.get(slot, slot))
    versions.publish(1, [10, 11])
    versions.publish(2, [10])
    versions.publish(3, [10, 0, 1])
    assert [versions.newest(worker_id) for worker_id in range(3)] == [3, 3, 1]
    assert [versions.lag(worker_id, 1) for worker_id in range(3)] == [2, 2, 0]
    server[0] = 11
    versions.publish(1, [0])
    assert (versions.newest(0), versions.lag(0, 0)) == (1, 1)


def test_lag_saturates() -> None:
    versions = SentVersions()
    for version in range(1, 6001):
        versions.publish(version, [3])
    assert versions.lag(3, 5000) == 1000
    assert versions.lag(3, 0) == 4096


@pytest.mark.parametrize("k", range(3))
@pytest.mark.parametrize("every", [1, 2, 4])
@pytest.mark.parametrize("burst", [1, 2])
def test_more_may_be_out_if_publications_are_rare(k: int, every: int, burst: int) -> None:
    assert len(habit(k, every, burst).ask_all()) == every * (k // burst + 1)


def test_deliveries_since_the_last_publication_count() -> None:
    trainer = habit(0, every=4)
    for left in (4, 3, 2, 1, 0, 0):
        tickets = trainer.ask_all()
        assert len(tickets) == left
        for ticket in tickets:
            trainer.pacer.given_up(ticket)
        trainer.deliver()
    # The publication is overdue, but can't come while the user waits.
    trainer.pacer.awaited()
    assert len(trainer.ask_all()) == 1


def test_a_burst_is_expected_to_go_on() -> None:
    trainer = habit(2, every=1, burst=3)
    trainer.deliver()
    assert not may_ask(trainer.pacer, 0, trainer.version)
    trainer.publish()
    assert may_ask(trainer.pacer, 0, trainer.version)
    assert not may_ask(trainer.pacer, 0, trainer.version - 1)
    trainer.pacer.awaited()
    assert may_ask(trainer.pacer, 0, trainer.version - 1)


def test_the_habit_is_forgotten() -> None:
    trainer = habit(1, every=1, burst=2)
    for _ in range(5):
        for _ in range(3):
            trainer.deliver()
        trainer.publish()
    assert len(trainer.ask_all()) == 3 * 2


def test_what_is_more_urgent_is_waited_for() -> None:
    trainer = habit(1, every=1)
    urgent = ask(trainer.pacer, 0, trainer.version - 1)
    other = ask(trainer.pacer, 1, trainer.version)
    assert choose(trainer.pacer, [other]) is None
    trainer.pacer.arrived(urgent, trainer.version)
    assert choose(trainer.pacer, [other]) is other
    trainer.pacer.arrived(urgent, trainer.version - 1)
    trainer.pacer.given_up(urgent)
    assert choose(trainer.pacer, [other]) is other


# The publications after each batch: the workers that get them.
Habit = Callable[[random.Random, int, int], list[list[int]]]


def every_batches(every: int) -> Habit:
    return lambda rng, batch, workers: [list(range(workers))] * (batch % every == 0)


def to_some(rng: random.Random, batch: int, workers: int) -> list[list[int]]:
    return [rng.sample(range(workers), rng.randint(1, workers))]


def in_bursts(rng: random.Random, batch: int, workers: int) -> list[list[int]]:
    count = rng.choice([0, 0, 0, 1, 1, 2, 4])
    return [to_some(rng, batch, workers)[0] for _ in range(count)]


class Simulation:
    """Workers of different speed, weights on their way, and a user who trains on each batch."""

    def __init__(self, seed: int, k: int, num_workers: int, published: Habit) -> None:
        self.about = f"seed {seed}, max_policy_lag {k}, {num_workers} workers"
        self.rng = random.Random(seed)
        self.trainer = Trainer(k, num_workers)
        self.pacer = self.trainer.pacer
        self.k = k
        self.published = published
        self.speed = [10 ** self.rng.uniform(-1, 1) for _ in range(num_workers)]
        self.training_s = 10 ** self.rng.uniform(-2, 0.5)
        self.weights_s = 10 ** self.rng.uniform(-3, 0.5)
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.num_events = 0
        self.held = [0] * num_workers  # the version that each worker has
        self.acknowledged = [0] * num_workers  # the version that the trainer knows of
        self.collecting: dict[int, StalenessTicket] = {}
        self.request = [0] * num_workers  # when each worker last got a request, to take turns
        self.arrived: list[StalenessTicket] = []
        self.waiting = False
        self.delivered = self.dropped = 0

    def run(self, num_batches: int) -> Simulation:
        self.wait_for_batch()
        while self.delivered < num_batches:
            self.settle()
            assert self.events, f"stalls after {self.delivered} batches: {self.about}"
            assert self.num_events < 100 * num_batches, f"gets nowhere: {self.about}"
            self.now, _, event = heappop(self.events)
            event()
        return self

    def later(self, delay_s: float, event: Callable[[], None]) -> None:
        self.num_events += 1
        heappush(self.events, (self.now + delay_s, self.num_events, event))

    def settle(self) -> None:
        """What a pool does after each event."""
        for stale in [ticket for ticket in self.arrived if is_too_stale(self.pacer, ticket)]:
            self.dropped += 1
            self.arrived.remove(stale)
            self.pacer.given_up(stale)
        if self.waiting and (chosen := choose(self.pacer, self.arrived)) is not None:
            self.deliver(chosen)
        for worker_id in sorted(self.trainer.workers, key=self.request.__getitem__):
            # A worker has at most one ready rollout while it collects another.
            if worker_id in self.collecting or self.lying(worker_id) > 1:
                continue
            if may_ask(self.pacer, worker_id, self.acknowledged[worker_id]):
                self.ask(worker_id)

    def lying(self, worker_id: int) -> int:
        return sum(ticket.worker_id == worker_id for ticket in self.arrived)

    def ask(self, worker_id: int) -> None:
        self.collecting[worker_id] = ask(self.pacer, worker_id, self.acknowledged[worker_id])
        self.request[worker_id] = self.num_events
        self.later(self.rng.uniform(0, 0.01), lambda: self.collect(worker_id))

    def collect(self, worker_id: int) -> None:
        version = self.held[worker_id]

        def arrive() -> None:
            ticket = self.collecting.pop(worker_id)
            assert version >= ticket.version
            self.pacer.arrived(ticket, version)
            self.arrived.append(ticket)

        self.later(self.speed[worker_id] * self.rng.uniform(0.5, 2), arrive)

    def deliver(self, ticket: StalenessTicket) -> None:
        lag = self.trainer.versions.lag(ticket.worker_id, ticket.version)
        assert lag <= self.k, f"lag {lag}: {self.about}"
        self.arrived.remove(ticket)
        self.pacer.delivered(ticket)
        self.delivered += 1
        self.waiting = False
        self.later(self.training_s * self.rng.uniform(0.5, 2), self.end_training)

    def end_training(self) -> None:
        for worker_ids in self.published(self.rng, self.delivered, len(self.trainer.workers)):
            self.trainer.publish(*worker_ids)
            for worker_id in worker_ids:
                self.send(worker_id, self.trainer.version)
        self.later(self.rng.choice([0, 0.1]), self.wait_for_batch)

    def wait_for_batch(self) -> None:
        self.waiting = True
        self.pacer.awaited()

    def send(self, worker_id: int, version: int) -> None:
        def arrive() -> None:
            self.held[worker_id] = max(self.held[worker_id], version)
            self.later(self.weights_s * self.rng.uniform(0, 1), acknowledge)

        def acknowledge() -> None:
            self.acknowledged[worker_id] = max(self.acknowledged[worker_id], version)

        self.later(self.weights_s * self.rng.uniform(0, 1), arrive)


BATCHES = 2000


@pytest.mark.parametrize("k", range(5))
@pytest.mark.parametrize(
    "published",
    [every_batches(1), every_batches(2), every_batches(7), to_some],
    ids=["every-batch", "every-2nd", "every-7th", "to-some"],
)
def test_a_steady_habit_costs_no_rollout(published: Habit, k: int) -> None:
    run = Simulation(k, k, random.Random(k).randint(1, 16), published).run(BATCHES)
    assert run.dropped == 0, f"{run.dropped} dropped: {run.about}"


@pytest.mark.parametrize("k", range(5))
def test_irregular_bursts_never_stall(k: int) -> None:
    run = Simulation(k, k, random.Random(k).randint(1, 16), in_bursts).run(BATCHES)
    assert run.dropped < BATCHES, f"{run.dropped} dropped: {run.about}"
