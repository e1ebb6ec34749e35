"""Plans of workers that join: a bounded number is on its way at one time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from distcollect.common.memory_segment import Segment
from distcollect.errors import WorkerLost
from distcollect.roster.plans import MAX_ON_THE_WAY, SHARED_FROM_BYTES, PlanSender
from distcollect.transport.worker_service import WorkerService

NUM_WORKERS = 1000


class Transport:
    """Answers when the test says so; ten peers are on each host."""

    def __init__(self) -> None:
        self.plans: deque[tuple[int, bytes, Future[Any]]] = deque()
        self.reads: deque[tuple[int, Segment, Future[Any]]] = deque()
        self.probes: dict[int, Future[Any]] = {}
        self.most = 0

    def host_key(self, peer: int) -> str:
        return f"host {peer // 10}"

    def call(self, peer: int, method: Any, *args: Any, share: bool = False) -> Future[Any]:
        answer: Future[Any] = Future()
        if method is WorkerService.receive_part:
            self.plans.append((peer, *args, answer))
            self.most = max(self.most, len(self.plans))
        elif method is WorkerService.read_part:
            self.reads.append((peer, *args, answer))
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
        assert plan == b"plan %d" % peer
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


LARGE = bytes(SHARED_FROM_BYTES)


def place_at(peer: int) -> Segment:
    return Segment(peer, 3, "plan", len(LARGE), f"host {peer // 10}")


@pytest.mark.parametrize("lost", [True, False], ids=["is lost", "has no shared memory"])
def test_another_worker_shares_the_plan(transport: Transport, lost: bool) -> None:
    sender = PlanSender(transport, run)  # type: ignore[arg-type]
    done: list[Future[Any]] = []
    for peer in range(3):
        sender.send(peer, [LARGE], done.append)
    _, _, first = transport.plans.popleft()
    if lost:
        first.set_exception(WorkerLost("it is gone"))
    else:
        first.set_result(None)
    [(peer, _, second)] = transport.plans
    assert peer == 1
    second.set_result(place_at(1))
    [(peer, place, read)] = transport.reads
    assert (peer, place) == (2, place_at(1))
    read.set_result(None)
    assert {*transport.probes} == ({1, 2} if lost else {0, 1, 2})
    assert len(done) == lost


def test_parts_come_one_after_the_other(transport: Transport) -> None:
    """Two workers with the same policy, and env makers of their own."""
    sender = PlanSender(transport, run)  # type: ignore[arg-type]
    done: list[Future[Any]] = []
    for peer in range(2):
        sender.send(peer, [LARGE, b"maker %d" % peer], done.append)
    [(peer, part, answer)] = transport.plans
    assert (peer, part) == (0, LARGE)
    transport.plans.clear()
    answer.set_result(place_at(0))
    [(peer, part, answer)] = transport.plans
    assert (peer, part) == (0, b"maker 0")
    answer.set_result(None)
    transport.reads.pop()[-1].set_result(None)
    peer, part, answer = transport.plans.pop()
    assert (peer, part) == (1, b"maker 1")
    assert {*transport.probes} == {0}
    answer.set_result(None)
    assert {*transport.probes} == {0, 1}
