"""The account of all frames, rule by rule. The pool's simulation checks all of them together."""

from __future__ import annotations

from typing import Any

import pytest

from distcollect.pool.ledger import Ledger
from distcollect.results import Frames
from distcollect.rollout.header import Header

FRAMES = 10


def ready(worker_id: int, incarnation: int, sequence: int, **more: Any) -> Header:
    """What a worker says of a rollout that lies there."""
    return Header(worker_id, incarnation, sequence, FRAMES, FRAMES, 0, (0, 0), **more)


def announced(*sequences: int, stepped: int = 0) -> Ledger:
    """Register ready rollouts of worker 3's first process."""
    ledger = Ledger()
    for sequence in sequences:
        so_far = max(stepped, (sequence + 1) * FRAMES)
        ledger.announce(ready(3, 0, sequence, stepped=so_far))
    return ledger


def test_env_faults_of_all_processes_of_a_worker() -> None:
    ledger = Ledger()
    ledger.announce(ready(3, 0, 0, stepped=FRAMES, env_faults=2))
    ledger.announce(ready(3, 0, 1, stepped=2 * FRAMES, env_faults=3))
    ledger.env_failed(3, 0, 5)
    ledger.lose_waiting("shut_down")
    ledger.end(3, 0, "worker_lost", stepped=2 * FRAMES)
    ledger.env_failed(3, 0, 9)  # it is settled
    ledger.announce(ready(3, 1, 0, stepped=FRAMES, env_faults=1))
    report = ledger.report()
    assert report.workers[3].env_faults == report.total.env_faults == 6
    assert str(report).splitlines()[0].endswith("env faults")
    assert str(report).splitlines()[-1].endswith(" 6")
    assert "env faults" not in str(announced(0).report())


@pytest.mark.parametrize("sequence", [0, 1, 3])
def test_rollouts_are_announced_in_their_order_and_once(sequence: int) -> None:
    ledger = announced(0, 1)
    before = ledger.report()
    with pytest.raises(
        ValueError,
        match=f"worker 3, incarnation 0: rollout {sequence} was announced, but 2 is next",
    ):
        ledger.announce(ready(3, 0, sequence, stepped=99, lost=[("x", 1)]))
    assert ledger.report() == before


@pytest.mark.parametrize("incarnation", [0, 2])
@pytest.mark.parametrize("waits", [True, False])
def test_nothing_more_comes_of_a_process_that_has_ended(incarnation: int, *, waits: bool) -> None:
    """Also if an earlier process, or one of its own rollouts, is still open."""
    ledger = Ledger()
    ledger.announce(ready(3, incarnation, 0, stepped=15))
    if not waits:
        ledger.deliver(3, incarnation, 0)
    ledger.end(3, incarnation, "worker_lost", stepped=17)
    before = ledger.report()
    for sequence in (0, 1):
        with pytest.raises(ValueError, match="none is next"):
            ledger.announce(ready(3, incarnation, sequence, stepped=99))
    ledger.end(3, incarnation, "left", stepped=99)
    ledger.end(3, incarnation, "left", stepped=None, at_most=5)
    assert ledger.report() == before
    assert before.total.stepped == 17


def test_only_of_a_host_that_vanished_it_is_not_known_exactly() -> None:
    ledger = announced(0, stepped=12)
    ledger.end(3, 0, "worker_lost", stepped=None, at_most=FRAMES)
    frames = Frames(stepped=12, lost={"worker_lost": 2}, open=10, at_most=FRAMES)
    assert ledger.report().total == frames
    known = announced(0, stepped=12)
    known.end(3, 0, "worker_lost", stepped=12, at_most=FRAMES)
    assert known.report().total.at_most == 0


def test_the_report_is_a_table() -> None:
    ledger = Ledger()
    for sequence in range(300):
        ledger.announce(ready(0, 0, sequence, stepped=(sequence + 1) * FRAMES))
        ledger.deliver(0, 0, sequence)
    ledger.announce(ready(11, 0, 0, stepped=12, lost=[("row_skew", 2)]))
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
