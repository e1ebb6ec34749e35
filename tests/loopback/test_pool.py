"""The pool's order of actions; workers answer when the test says so."""

from __future__ import annotations

import sys
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from helpers.pool_simulation import taken

from distcollect.config import Staleness
from distcollect.errors import BatchTimeout
from distcollect.pool.pool import Pool
from distcollect.pool.worker_slots import BatchPlan
from distcollect.rollout.header import Header
from distcollect.rollout.layout import Tensors
from distcollect.transport.protocol import CollectRequest
from distcollect.weights.push_handle import PushHandle

FRAMES = 4


class Offer:
    """A rollout that arrives when the test says so."""

    def __init__(self, header: Header) -> None:
        self.header = header
        self.declined = False
        self.fetched: Future[Tensors] | None = None

    def fetch(self) -> Future[Tensors]:
        assert self.fetched is None, "fetched twice"
        assert not self.declined, "fetched after it was declined"
        self.fetched = Future()
        return self.fetched

    def decline(self) -> None:
        self.declined = True

    def arrive(self) -> None:
        assert self.fetched is not None
        self.fetched.set_result([])


class Transport:
    """Keeps the requests until the test answers them, or answers them at once."""

    def __init__(self) -> None:
        self.requests: list[tuple[int, Future[Offer]]] = []
        self.offers: list[Offer] = []
        self.counts: dict[int, int] = {}
        self.versions: dict[int, int] = {}
        self.at_once = False

    def collect(self, peer: int, request: CollectRequest) -> Future[Offer]:
        answer: Future[Offer] = Future()
        self.requests.append((peer, answer))
        if self.at_once:
            self.answer(peer)
        return answer

    def answer(self, peer: int) -> Offer:
        """Answer the oldest open request of a worker."""
        index = next(i for i, (owner, _) in enumerate(self.requests) if owner == peer)
        _, answer = self.requests.pop(index)
        sequence = self.counts[peer] = self.counts.get(peer, -1) + 1
        version = self.versions.get(peer, 0)
        stepped = (sequence + 1) * FRAMES
        header = Header(peer, 0, sequence, FRAMES, FRAMES, 0, (version, version), stepped=stepped)
        offer = Offer(header)
        self.offers.append(offer)
        answer.set_result(offer)
        return offer

    def open_requests(self, peer: int) -> int:
        return sum(owner == peer for owner, _ in self.requests)

    def call(self, peer: int, method: Any, *args: Any) -> Future[Any]:
        raise AssertionError(method.__name__)

    def disconnect(self, peer: int) -> None: ...

    def close(self, grace_s: float = 0) -> None: ...


class Sender:
    """Acknowledges when the test says so."""

    def __init__(self) -> None:
        self.has: dict[int, int] = {}
        self.published: list[int] = []
        self.on_acknowledged: Any = None
        self.on_left_out: Any = None

    def acknowledged(self, worker_id: int) -> int:
        return self.has.get(worker_id, 0)

    def publish(self, flat: torch.Tensor, version: int, worker_ids: Any) -> PushHandle:
        self.published.append(version)
        return PushHandle(version, worker_ids, 1.0)

    def acknowledge(self, worker_id: int, version: int) -> None:
        self.has[worker_id] = version
        self.on_acknowledged(worker_id, version)

    def welcome(self, worker_id: int, peer: int) -> int:
        return 0

    def forget(self, worker_id: int, *, replaced: bool) -> None: ...

    def expect_nobody(self) -> None: ...

    def close(self) -> None: ...


class FailureSink:
    """Records what the pool reports about workers."""

    def __init__(self) -> None:
        self.failed: list[int] = []
        self.done: list[int] = []

    def report(
        self, worker_id: int, incarnation: int, error: BaseException, *, is_final: bool = False
    ) -> None:
        self.failed.append(worker_id)

    def drained(self, worker_id: int, incarnation: int) -> None:
        self.done.append(worker_id)


def make(
    *,
    sync: bool,
    num_workers: int = 1,
    staleness: Staleness | None = None,
    transport: Transport | None = None,
    **options: Any,
) -> tuple[Pool, Transport, Sender]:
    transport, sender = transport or Transport(), Sender()
    pool = Pool(
        transport,  # type: ignore[arg-type]
        sender,  # type: ignore[arg-type]
        BatchPlan(sync=sync, num_rollouts=num_workers, num_envs=1, num_steps=FRAMES),
        failure_sink=FailureSink(),
        staleness=staleness,
        **options,
    )
    for worker_id in range(num_workers):
        pool.join(worker_id, 0, worker_id)
    return pool, transport, sender


FLAT = torch.zeros(16, dtype=torch.uint8)


def ask(pool: Pool) -> None:
    with pytest.raises(BatchTimeout):
        pool.get(0.01)


def test_a_slab_is_not_written_to_while_it_is_read() -> None:
    """Also if the next rollout arrives earlier, or is given up."""
    pool, transport, _ = make(sync=False, num_workers=3)
    ask(pool)
    ask(pool)
    first = transport.answer(0)
    second = transport.answer(0)
    assert transport.open_requests(0) == 0, "both slabs are in use"
    second.arrive()
    assert transport.open_requests(0) == 0, "the next rollout would be written over the first"
    first.arrive()
    assert transport.open_requests(0) == 1


def test_in_sync_mode_a_worker_waits_for_the_weights_sent_to_it() -> None:
    pool, transport, sender = make(sync=True, num_workers=2)
    pool.push(FLAT, [1])
    with pytest.raises(BatchTimeout, match=r"workers \[0\] and for workers \[1\] to acknowledge"):
        pool.get(0.01)
    assert [transport.open_requests(w) for w in (0, 1)] == [1, 0]
    transport.answer(0)
    sender.acknowledge(1, 1)
    with pytest.raises(BatchTimeout, match=r"waited for workers \[0, 1\]"):
        pool.get(0.01)
    assert [transport.open_requests(w) for w in (0, 1)] == [1, 1]


def test_several_stale_rollouts_are_given_up_at_once() -> None:
    """Also if the next requests are answered at once."""
    pool, transport, _ = make(
        sync=False, num_workers=3, staleness=Staleness(max_policy_lag=0, mode="drop")
    )
    ask(pool)
    ask(pool)
    offers = [transport.answer(worker_id) for worker_id in (0, 1, 2, 0, 1)]
    assert [offer.fetched is not None for offer in offers] == [True, True, *[False] * 3]
    pool.push(FLAT)
    pool.push(FLAT)
    transport.versions = dict.fromkeys(range(3), 2)
    transport.at_once = True
    ask(pool)
    transport.at_once = False
    assert all(offer.declined for offer in offers[2:])
    assert sum(pool.stale_frames.values()) == 3 * FRAMES
    for offer in offers[:2]:
        offer.arrive()
    ask(pool)
    for offer in transport.offers:
        if offer.fetched and not offer.fetched.done():
            offer.arrive()
    assert taken(pool, 5)[0].header.policy_version == (2, 2)
    assert sum(pool.stale_frames.values()) == 5 * FRAMES


class InstantOffer(Offer):
    """A rollout that arrives before the call that fetches it returns."""

    def fetch(self) -> Future[Tensors]:
        fetched = super().fetch()
        self.arrive()
        return fetched


class InstantTransport(Transport):
    """Its workers answer before the call that asks them returns."""

    def collect(self, peer: int, request: CollectRequest) -> Future[Offer]:
        sequence = self.counts[peer] = self.counts.get(peer, -1) + 1
        stepped = (sequence + 1) * FRAMES
        header = Header(peer, 0, sequence, FRAMES, FRAMES, 0, (0, 0), stepped=stepped)
        answer: Future[Offer] = Future()
        answer.set_result(InstantOffer(header))
        return answer


def test_answers_that_come_at_once_do_not_nest() -> None:
    num_workers = 3000
    pool, _, _ = make(sync=True, num_workers=num_workers, transport=InstantTransport())
    for _ in range(2):
        rollouts = taken(pool, 60)
        assert [r.header.worker_id for r in rollouts] == list(range(num_workers))


@pytest.mark.parametrize("staleness", [None, Staleness(0), Staleness(2, mode="drop")])
@pytest.mark.parametrize("sync", [True, False])
def test_the_work_for_a_rollout_does_not_grow_with_the_workers(
    sync: bool, staleness: Staleness | None
) -> None:
    def num_calls(num_workers: int) -> float:
        """Calls of functions for each rollout."""
        pool, _, _ = make(
            sync=sync,
            num_workers=num_workers,
            staleness=staleness,
            transport=InstantTransport(),
        )
        num_batches = 3 if sync else 300
        for _ in range(num_batches):
            taken(pool, 5)
        calls = 0

        def count(*_: Any) -> None:
            nonlocal calls
            calls += 1

        sys.setprofile(count)
        try:
            for _ in range(num_batches):
                taken(pool, 5)
        finally:
            sys.setprofile(None)
        return calls / num_batches / (num_workers if sync else 1)

    assert num_calls(400) < 1.2 * num_calls(20)
