"""Plans of workers that join: a bounded number is on its way at one time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from distcollect.errors import WorkerLost
from distcollect.roster.plans import MAX_ON_THE_WAY, SHARED_FROM_BYTES, PlanSender
from distcollect.transport.worker_service import WorkerService

NUM_WORKERS = 1000


class Transport:
    """Answers when the test says so."""

    def __init__(self) -> None:
        self.plans: deque[tuple[int, list[Any], Future[Any]]] = deque()
        self.probes: dict[int, Future[Any]] = {}
        self.most = 0

    def shares_memory(self, peer: int) -> bool:
        return peer % 2 == 0

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


def test_workers_on_this_host_map_the_same_memory_for_a_large_part(transport: Transport) -> None:
    sender = PlanSender(transport, run)  # type: ignore[arg-type]
    part, done = bytes(range(256)) * (SHARED_FROM_BYTES >> 8), list[Future[Any]]()
    for peer in range(4):
        sender.send(peer, [part, b"maker %d" % peer], done.append)
    (_, shared, first), (_, sent, _), (_, again, _), _ = transport.plans
    assert sent == [part, b"maker 1"]
    assert [shared[0], b"maker 2"] == again
    place = shared[0]
    first.set_result(None)
    assert place.open()[:] == part, "the others are to map it yet"
    for _, _, answer in [*transport.plans][1:]:
        answer.set_result(None)
    transport.plans.clear()
    del answer, first
    with pytest.raises(OSError, match=r"No such file|no longer"):
        place.open()
    assert len(transport.probes) == 4
