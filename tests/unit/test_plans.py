"""Plans of workers that join: a bounded number is on its way at one time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from distcollect.errors import WorkerLost
from distcollect.roster.plans import MAX_ON_THE_WAY, PlanSender
from distcollect.transport.worker_service import WorkerService

NUM_WORKERS = 1000


class Transport:
    """Answers when the test says so."""

    def __init__(self) -> None:
        self.plans: deque[tuple[int, list[bytes], Future[Any]]] = deque()
        self.probes: dict[int, Future[Any]] = {}
        self.most = 0

    def call(self, peer: int, method: Any, *args: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        if method is WorkerService.receive_plan:
            self.plans.append((peer, *args, answer))
            self.most = max(self.most, len(self.plans))
        else:
            assert method is WorkerService.configure
            self.probes[peer] = answer
        return answer


@pytest.fixture
def transport() -> Transport:
    return Transport()


def run(event: Callable[[], None]) -> None:
    event()


def test_plans_of_a_thousand_workers_are_sent_some_at_a_time_and_built_all_at_once(
    transport: Transport,
) -> None:
    sender = PlanSender(transport, run)  # type: ignore[arg-type]
    done: list[Future[Any]] = []
    for peer in range(NUM_WORKERS):
        sender.send(peer, [b"plan %d" % peer], done.append)
    seen = []
    while transport.plans:
        peer, plan, answer = transport.plans.popleft()
        assert plan == [b"plan %d" % peer]
        seen.append(peer)
        answer.set_result(None)
    assert seen == list(range(NUM_WORKERS))
    assert transport.most == MAX_ON_THE_WAY
    assert len(transport.probes) == NUM_WORKERS, "none waits until another has made its envs"
    assert not done
    for probe in transport.probes.values():
        probe.set_result("found")
    assert [answer.result() for answer in done] == ["found"] * NUM_WORKERS


def test_a_worker_that_is_lost_leaves_room_for_others(transport: Transport) -> None:
    sender = PlanSender(transport, run)  # type: ignore[arg-type]
    done: list[Future[Any]] = []
    for peer in range(2 * MAX_ON_THE_WAY):
        sender.send(peer, [b""], done.append)
    for _ in range(MAX_ON_THE_WAY):
        transport.plans.popleft()[-1].set_exception(WorkerLost("it is gone"))
    assert len(done) == len(transport.plans) == MAX_ON_THE_WAY
    assert all(isinstance(answer.exception(), WorkerLost) for answer in done)
    assert not transport.probes
