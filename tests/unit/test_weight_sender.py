"""Which worker is sent which version, when; over a transport that answers as the test says."""

from __future__ import annotations

import gc
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import distcollect as dc
from distcollect.policy.live_weights import LiveWeights
from distcollect.policy.weight_layout import WeightEncoding, WeightLayout, checksum
from distcollect.transport.worker_service import Push, WeightSource, WorkerService
from distcollect.weights.receiver import WeightReceiver
from distcollect.weights.sender import WeightSender
from distcollect.weights.updaters import InlineSource

SOON_S = 10


class Transport:
    """Peers answer every push with its version, unless ``receive`` says something else.

    Attributes:
        receive: peer and push to the answer, to an error, or to a future of one.
        cancel: called with a peer that is told to receive no longer; returns the same.
        silent: peers that answer nothing.
    """

    def __init__(self) -> None:
        self.receive: Callable[[int, Push], Any] = lambda _, push: push.version
        self.cancel: Callable[[int], Any] = lambda _: None
        self.silent: set[int] = set()

    def ping(self, peer: int) -> Future[Any]:
        return self.call(peer, None)

    def call(self, peer: int, method: Any, *args: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        if peer in self.silent:
            return answer
        outcome: Any = None
        if method is WorkerService.receive_weights:
            outcome = self.receive(peer, *args)
        elif method is WorkerService.cancel_receiving:
            outcome = self.cancel(peer)
        if isinstance(outcome, Future):
            return outcome
        if isinstance(outcome, BaseException):
            answer.set_exception(outcome)
        else:
            answer.set_result(outcome)
        return answer


class Updater(dc.WeightUpdaterBase):
    """Moves nothing; ``before`` is called with the workers of each push, on the sender's thread."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, ...]] = []
        self.before: Callable[[], None] = lambda: None

    def sources(
        self, payload: torch.Tensor, peers: Mapping[int, int]
    ) -> Mapping[int, WeightSource]:
        self.sent.append(tuple(peers))
        self.before()
        return dict.fromkeys(peers, InlineSource(payload))


class World:
    """A sender, and workers whose peers are 100 more than their ids."""

    def __init__(self, num_workers: int) -> None:
        self.transport = Transport()
        self.updater = Updater()
        self.layout = WeightLayout.of(nn.Linear(2, 2))
        self.sender = WeightSender(
            self.transport,  # type: ignore[arg-type]
            self.layout,
            self.updater,
            options=dc.WeightSync(ready_timeout_s=0.2),
            timeout_s=0.2,
        )
        self.acknowledged: list[tuple[int, int]] = []
        self.left_out: dict[int, dc.DistCollectError] = {}
        self.sender.on_acknowledged = lambda *what: self.acknowledged.append(what)
        self.sender.on_left_out = self.left_out.__setitem__
        self.version = 0
        self.snapshots: list[weakref.ref[torch.Tensor]] = []
        for worker_id in range(num_workers):
            self.sender.welcome(worker_id, 100 + worker_id)

    def publish(self, *worker_ids: int, apart: bool = False) -> dc.PushHandle:
        self.version += 1
        flat = self.layout.empty()
        self.snapshots.append(weakref.ref(flat))
        return self.sender.publish(flat, self.version, worker_ids, apart=apart)

    @property
    def num_snapshots(self) -> int:
        gc.collect()
        return sum(snapshot() is not None for snapshot in self.snapshots)


@pytest.fixture
def make() -> Iterator[Callable[[int], World]]:
    worlds: list[World] = []

    def make(num_workers: int) -> World:
        worlds.append(World(num_workers))
        return worlds[-1]

    yield make
    for world in worlds:
        world.sender.close()


def test_no_worker_starves_while_others_are_published_to_without_end(
    make: Callable[[int], World],
) -> None:
    """Before each push, there are newer versions for two others."""
    world = make(3)
    began, waits = threading.Event(), threading.Event()

    def publish_more() -> None:
        began.set()
        assert_within(waits)
        if len(world.updater.sent) < 100:
            world.publish(1)
            world.publish(2)

    world.updater.before = publish_more
    world.publish(1)
    assert_within(began)  # from the second push on, worker 0 is among those that wait
    handle = world.publish(0)
    waits.set()
    handle.wait(SOON_S)
    turn = next(i for i, worker_ids in enumerate(world.updater.sent) if 0 in worker_ids)
    assert turn < 3, "once each other had its turn"


def test_memory_for_snapshots_is_bounded(make: Callable[[int], World]) -> None:
    """While nothing can be sent, and once all was sent: whatever each of 50 workers is to have."""
    world = make(50)
    go_on = threading.Event()
    world.updater.before = lambda: assert_within(go_on)
    handles = [world.publish(number % 50, (number + 7) % 50) for number in range(200)]
    assert world.num_snapshots <= 12
    go_on.set()
    for handle in handles:
        handle.wait(SOON_S)
    assert sum(handle.num_bytes > 0 for handle in handles) <= 51, "only the newest of each is sent"
    assert len(world.updater.sent) <= 51
    newest = {w: max(h.version for h in handles if w in h.worker_ids) for w in range(50)}
    assert all(world.sender.acknowledged(w) >= version for w, version in newest.items())
    assert world.num_snapshots <= 12
    for worker_id, version in newest.items():
        world.sender.forget(worker_id, replaced=True)
        assert world.sender.welcome(worker_id, 200 + worker_id) >= version


def assert_within(event: threading.Event) -> None:
    assert event.wait(SOON_S)


@pytest.mark.parametrize(("num_workers", "apart"), [(8, False), (30, True)])
def test_few_versions_and_what_is_apart_are_kept_as_they_are(
    make: Callable[[int], World], num_workers: int, apart: bool
) -> None:
    """Who replaces a worker gets the very version that was published for it."""
    world = make(num_workers)
    for worker_id in range(num_workers):
        world.publish(worker_id, apart=apart).wait(SOON_S)
    for worker_id in range(num_workers):
        world.sender.forget(worker_id, replaced=True)
        assert world.sender.welcome(worker_id, 200 + worker_id) == 1 + worker_id


def test_a_new_process_gets_no_weights_of_other_workers(make: Callable[[int], World]) -> None:
    """One that replaces another gets what that one was to have, one of a new worker the newest."""
    world = make(2)

    def replaced(worker_id: int) -> int:
        world.sender.forget(worker_id, replaced=True)
        return world.sender.welcome(worker_id, 200 + worker_id)

    world.publish(0, apart=True).wait(5)
    assert (replaced(1), world.sender.welcome(2, 102)) == (0, 0)
    world.publish(0, 2).wait(5)
    assert (replaced(0), replaced(1), world.sender.welcome(3, 103)) == (2, 0, 2)
    world.publish(3, apart=True).wait(5)
    assert (replaced(2), replaced(3), replaced(4)) == (2, 3, 2)
    world.sender.forget(3, replaced=False)  # given up; its host comes back later
    assert (world.sender.welcome(3, 303), world.sender.welcome(5, 105)) == (3, 2)
    world.sender.forget(3, replaced=False)
    world.publish(0, 1, 2, 4, 5).wait(5)  # all that there are: newer than its own
    assert world.sender.welcome(3, 403) == 4


def test_receivers_do_not_wait_for_what_the_trainer_failed_to_send(
    make: Callable[[int], World],
) -> None:
    """Also where each receives by itself: they are told, and get it when it is sent again."""
    world = make(2)
    waiting: dict[int, Future[int]] = {100: Future(), 101: Future()}

    def send(_: torch.Tensor) -> None:
        if len(world.updater.sent) == 1:
            raise RuntimeError("the connection broke")

    def receive(peer: int, push: Push) -> Any:
        return push.version if len(world.updater.sent) > 1 else waiting[peer]

    world.updater.send = send  # type: ignore[method-assign]
    world.transport.receive = receive
    world.transport.cancel = lambda peer: waiting[peer].set_exception(RuntimeError("cancelled"))
    handle = world.publish(0, 1)
    handle.wait(SOON_S)
    assert handle.acknowledged == {0: 1, 1: 1}
    assert all(answer.done() for answer in waiting.values())


def test_the_end_of_one_push_does_not_reach_the_next(make: Callable[[int], World]) -> None:
    """A receiver's own error overtakes the message that tells it not to wait any longer."""
    world = make(2)
    world.updater.together = True
    order: list[str] = []
    failing: Future[int] = Future()

    def receive(peer: int, push: Push) -> Any:
        if len(world.updater.sent) > 1:
            order.append("next push")
            return push.version
        return failing if peer == 100 else RuntimeError("lost its connection")

    def cancel(_: int) -> Future[None]:
        failing.set_exception(RuntimeError("lost its connection, too"))
        arrived: Future[None] = Future()

        def arrive() -> None:
            order.append("told")
            arrived.set_result(None)

        threading.Timer(0.1, arrive).start()
        return arrived

    world.transport.receive = receive
    world.transport.cancel = cancel
    world.publish(0, 1).wait(SOON_S)
    assert order[:2] == ["told", "next push"]


def test_a_version_that_is_on_its_way_when_versions_are_renumbered(
    make: Callable[[int], World],
) -> None:
    """Its acknowledgement counts for nothing: it is sent again under the new number."""
    world = make(1)
    generations: list[int] = []

    def receive(_: int, push: Push) -> int:
        if not generations:
            assert world.sender.resume(100) == 1
        generations.append(push.generation)
        return push.version

    world.transport.receive = receive
    handle = world.publish(0)
    handle.wait(SOON_S)
    assert generations == [0, 1]
    assert world.acknowledged == [(0, 100)]
    assert world.sender.acknowledged(0) == 100
    assert handle.acknowledged == {0: 100}


class TestReceiver:
    """A worker's weights are renumbered while versions arrive."""

    def setup_method(self) -> None:
        self.module = nn.Linear(2, 2)
        self.live = LiveWeights(self.module)
        self.receiver = WeightReceiver(self.live, "127.0.0.1", lambda *_: None)

    def teardown_method(self) -> None:
        self.receiver.close()

    def receive(self, version: int, value: float, generation: int) -> Any:
        flat = self.live.layout.empty()
        for view in self.live.layout.views(flat):
            view.fill_(value)
        push = Push(
            version,
            InlineSource(flat),
            WeightEncoding(),
            checksum(flat),
            0,
            generation,
        )
        return self.receiver.receive(push).result(SOON_S)

    def test_a_change_of_weights_that_the_policy_has_swapped_is_refused(self) -> None:
        def receive(version: int, data: torch.Tensor, encoding: WeightEncoding) -> Any:
            push = Push(version, InlineSource(data), encoding, checksum(data), version - 1)
            return self.receiver.receive(replace(push, changes_follow=True)).result(SOON_S)

        flat = self.live.layout.empty()
        self.live.layout.views(flat)[0].copy_(torch.arange(4.0).view(2, 2))
        receive(1, flat, WeightEncoding())
        self.live.apply()
        receive(2, flat[:0], WeightEncoding(entries=()))
        self.live.apply()
        self.module.weight.data.copy_(self.module.weight.data.flip(0))
        with pytest.raises(RuntimeError, match="the policy has changed its parameters itself"):
            receive(3, flat[:0], WeightEncoding(entries=()))

    def test_what_has_come_along_is_not_copied_and_nothing_adds_up(self) -> None:
        arrived: list[weakref.ref[Any]] = []
        for version in range(1, 12):
            flat = self.live.layout.empty().fill_(version)
            source = pickle.loads(pickle.dumps(InlineSource(flat)))
            arrived.append(weakref.ref(source.arrived.numpy().base))
            place = source.arrived.data_ptr()
            push = Push(version, source, WeightEncoding(), checksum(flat))
            del source
            self.receiver.receive(push).result(SOON_S)
            del push
            self.live.apply()
            assert self.module.weight.untyped_storage().data_ptr() == place
        gc.collect()
        assert sum(each() is not None for each in arrived) <= 2

    def test_what_lies_ready_has_the_new_number(self) -> None:
        self.receive(1, 1.0, generation=0)
        self.receiver.renumber(100, generation=1)
        self.live.apply()
        assert (self.live.version, self.live.newest) == (100, 100)
        assert (self.module.weight == 1).all()

    def test_what_comes_late_is_refused(self) -> None:
        self.receiver.renumber(100, generation=1)
        with pytest.raises(RuntimeError, match="renumbered"):
            self.receive(1, 1.0, generation=0)
        assert self.live.newest == 100
        self.receive(101, 2.0, generation=1)
        self.live.apply()
        assert self.live.version == 101

    def test_a_new_number_that_came_first_stays(self) -> None:
        self.receive(101, 2.0, generation=1)
        self.receiver.renumber(100, generation=1)
        self.live.apply()
        assert self.live.version == 101
