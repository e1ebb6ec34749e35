"""What is said while workers take long to start."""

from __future__ import annotations

import threading

import pytest

from distcollect.common import waiting
from distcollect.common.waiting import Reminder, wait_for
from distcollect.roster.membership import WorkerPhase
from distcollect.roster.process import Process, start_report


def test_a_wait_is_mentioned_less_and_less_often() -> None:
    wait = Reminder(100.0)
    assert [now for now in range(100, 200) if wait.is_due(now)] == [110, 120, 140, 180]


def test_waiting_reminds_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "FIRST_S", 0.01)
    changed, reminders = threading.Condition(), list[float]()
    with changed:
        assert wait_for(changed, lambda: len(reminders) > 1, 60.0, reminders.append)
        assert reminders[0] >= 0.01
        assert reminders[1] >= 2 * reminders[0]
        assert not wait_for(changed, lambda: False, 0.02, lambda _: None)
        assert wait_for(changed, lambda: True, 0.0, reminders.append)
    assert len(reminders) == 2


def test_the_report_says_who_is_awaited_for_what_and_how_long() -> None:
    phases = [WorkerPhase.READY, WorkerPhase.PROBING, WorkerPhase.STARTED, WorkerPhase.PAUSED]
    processes = {
        worker_id: Process(worker_id, 0, 10 + worker_id, over_rpc=True) for worker_id in range(3)
    }
    assert start_report(phases, processes, 20.04, 180.0) == (
        "1 of 4 workers are ready after 20 s; waiting up to 180 s in all for worker 1, which makes "
        "its envs and policy and tries them; worker 2, which has to join; worker 3, which has not "
        "been started yet"
    )
    assert start_report([WorkerPhase.PAUSED] * 64, {}, 20.0, 180.0).endswith(
        "worker 4, which has not been started yet; 59 more"
    )
