"""Decisions about staleness, rule by rule; ``test_pool_churn.py`` has all of them in a run."""

from __future__ import annotations

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
