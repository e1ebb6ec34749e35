"""One contract for all transports; then what only real processes can show."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.paths import TESTS
from helpers.scripts.peer import WORKER_ID, Service, rollout

import distcollect as dc
from distcollect.transport import rpc
from distcollect.transport.loopback import LoopbackTransport
from distcollect.transport.peer_ids import identity
from distcollect.transport.protocol import INLINE_BYTES, CollectRequest
from distcollect.transport.rpc import PeerAddress, RpcTransport

SOON_S = 10
SMALL, LARGE = 100, 200_000


class Loopback:
    """A transport and a peer of it in this process."""

    def __init__(self) -> None:
        self.transport = LoopbackTransport()
        self.peer = 1
        self.transport.connect(self.peer, Service())

    def sent_bytes(self) -> int:
        return self.transport.bytes_fetched

    def close(self) -> None:
        self.transport.close()


class Rpc:
    """A transport and a peer of it in a process of its own."""

    def __init__(self, channels: list[str] | None = None) -> None:
        self.transport = RpcTransport(identity().trainer, address="127.0.0.1")
        self.processes: list[subprocess.Popen[str]] = []
        self.peer = self.add_peer(channels or rpc._CHANNELS)

    def add_peer(self, channels: list[str]) -> int:
        peer = identity().new_peer()  # ids are never used twice in one process
        process = subprocess.Popen(
            [sys.executable, "-m", "scripts.peer"],
            cwd=TESTS,
            env={**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)
        assert process.stdin is not None
        assert process.stdout is not None
        boot = {"id": peer, "endpoint": self.transport.endpoint, "channels": channels}
        process.stdin.write(json.dumps(boot) + "\n")
        process.stdin.flush()
        self.transport.connect(peer, PeerAddress(process.stdout.readline().strip()))
        return peer

    def sent_bytes(self) -> int:
        """What the peer has written to its sockets (true with the channel "basic" alone)."""
        counters = Path(f"/proc/{self.processes[0].pid}/io").read_text().splitlines()
        return int(dict(line.split(": ") for line in counters)["wchar"])

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        self.processes[0].send_signal(number)

    def close(self) -> None:
        self.transport.close()
        for process in self.processes:
            process.kill()
            process.communicate()


@pytest.fixture(params=[Loopback, Rpc])
def world(request: pytest.FixtureRequest) -> Iterator[Loopback | Rpc]:
    world = request.param()
    yield world
    world.close()


@pytest.fixture
def rpc_world() -> Iterator[Rpc]:
    world = Rpc()
    yield world
    world.close()


def check(tensors: list[torch.Tensor], num_steps: int) -> None:
    expected = rollout(num_steps)
    assert [t.dtype for t in tensors] == [t.dtype for t in expected]
    assert [t.shape for t in tensors] == [t.shape for t in expected]
    assert all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True))


# Each RPC world costs two seconds, so a test asks it for more than one thing.


def test_calls(world: Loopback | Rpc) -> None:
    ask = world.transport.call
    assert ask(world.peer, Service.echo, 1, "two", None).result(SOON_S) == (1, "two", None)

    for method in (Service.fail, Service.fail_later):
        with pytest.raises(dc.WorkerError, match="ValueError: of no value") as caught:
            ask(world.peer, method, "of no value").result(SOON_S)
        assert caught.value.worker_id == WORKER_ID
        assert "in fail\n" in caught.value.remote_traceback
        assert not isinstance(caught.value, dc.WorkerLost)

    # More answers owed than any pool of threads has threads.
    later = [ask(world.peer, Service.later, f"key{i}") for i in range(20)]
    assert ask(world.peer, Service.echo).result(SOON_S) == ()
    assert not any(answer.done() for answer in later)
    for i in reversed(range(20)):
        ask(world.peer, Service.release, f"key{i}", i).result(SOON_S)
    assert [answer.result(SOON_S) for answer in later] == list(range(20))


def no_such_method(service: Any) -> None: ...


@pytest.mark.parametrize("method", [no_such_method, Service.private], ids=lambda m: m.__name__)
def test_a_method_that_its_protocol_does_not_declare_is_refused(
    world: Loopback | Rpc, method: Callable[[Any], None]
) -> None:
    with pytest.raises(dc.WorkerError, match=method.__name__):
        world.transport.call(world.peer, method).result(SOON_S)


@pytest.mark.parametrize("num_steps", [0, SMALL, LARGE])
def test_a_rollout_is_offered_then_fetched(world: Loopback | Rpc, num_steps: int) -> None:
    offer = world.transport.collect(world.peer, CollectRequest(num_steps)).result(SOON_S)
    assert (offer.header.num_frames, offer.header.policy_version) == (num_steps, (3, 5))
    tensors = offer.fetch().result(SOON_S)
    check(tensors, num_steps)
    for tensor in tensors:
        tensor.zero_()  # ours to keep: another rollout is not touched
    again = world.transport.collect(world.peer, CollectRequest(num_steps)).result(SOON_S)
    check(again.fetch().result(SOON_S), num_steps)
    with pytest.raises(dc.WorkerError, match="no rollout today"):
        world.transport.collect(world.peer, CollectRequest(1, random=True)).result(SOON_S)


@pytest.mark.parametrize("make", [Loopback, lambda: Rpc(["basic"])], ids=["Loopback", "Rpc"])
def test_a_declined_rollout_moves_no_bytes(
    make: Callable[[], Loopback | Rpc], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that the peer sends goes through its sockets here, and the kernel counts it."""
    monkeypatch.setattr(rpc, "_CHANNELS", ["basic"])
    world = make()
    try:
        size = sum(tensor.nbytes for tensor in rollout(LARGE))
        world.transport.call(world.peer, Service.echo).result(SOON_S)

        def cost(wanted: bool) -> int:
            before = world.sent_bytes()
            offer = world.transport.collect(world.peer, CollectRequest(LARGE)).result(SOON_S)
            assert offer.header.num_bytes == size
            if wanted:
                check(offer.fetch().result(SOON_S), LARGE)
            else:
                offer.decline()
            del offer
            world.transport.call(world.peer, Service.echo).result(SOON_S)
            return world.sent_bytes() - before

        assert cost(wanted=True) >= size
        assert cost(wanted=False) < size / 100
        assert cost(wanted=True) >= size
    finally:
        world.close()


def test_disconnecting_a_peer_fails_what_it_owes(world: Loopback | Rpc) -> None:
    pending = world.transport.call(world.peer, Service.later, "never")
    unfetched = world.transport.collect(world.peer, CollectRequest(SMALL)).result(SOON_S)
    world.transport.disconnect(world.peer)
    for answer in (
        pending,
        world.transport.call(world.peer, Service.echo),
        world.transport.collect(world.peer, CollectRequest(SMALL)),
        world.transport.call(world.peer + 12_345, Service.echo),  # nobody ever had this id
    ):
        with pytest.raises(dc.WorkerLost):
            answer.result(1)
    world.transport.disconnect(world.peer)
    unfetched.decline()


def test_closing_waits_for_answers_owed_and_again_is_no_error(world: Loopback | Rpc) -> None:
    owed = world.transport.call(world.peer, Service.soon, "here it is")
    world.transport.close(SOON_S)
    assert owed.result(0) == "here it is"
    world.transport.close()
    with pytest.raises(dc.WorkerLost):
        world.transport.call(world.peer, Service.echo).result(1)


def test_closing_fails_answers_that_do_not_come(world: Loopback | Rpc) -> None:
    owed = world.transport.call(world.peer, Service.later, "never")
    world.transport.close(0.1)
    with pytest.raises(dc.WorkerLost):
        owed.result(1)


def test_a_small_rollout_comes_with_its_header_and_a_large_one_stays(rpc_world: Rpc) -> None:
    """Once its peer is dead, only what had come along can be had."""
    offers = {
        steps: rpc_world.transport.collect(rpc_world.peer, CollectRequest(steps)).result(SOON_S)
        for steps in (SMALL, LARGE)
    }
    assert offers[SMALL].header.num_bytes < INLINE_BYTES < offers[LARGE].header.num_bytes
    rpc_world.kill()
    rpc_world.processes[0].wait(SOON_S)
    check(offers[SMALL].fetch().result(1), SMALL)
    with pytest.raises(dc.WorkerLost):
        offers[LARGE].fetch().result(SOON_S)
    rpc_world.transport.disconnect(rpc_world.peer)


def test_kill_9_fails_what_is_owed(rpc_world: Rpc) -> None:
    """Also where nobody disconnects the peer; the others are not affected."""
    other = rpc_world.add_peer(rpc._CHANNELS)
    pending = [rpc_world.transport.call(rpc_world.peer, Service.later, str(i)) for i in range(3)]
    others = rpc_world.transport.call(other, Service.later, "key")
    rpc_world.transport.call(rpc_world.peer, Service.echo).result(SOON_S)
    rpc_world.kill()
    for answer in pending:
        with pytest.raises(dc.WorkerLost):
            answer.result(5)
    rpc_world.transport.disconnect(rpc_world.peer)
    rpc_world.transport.call(other, Service.release, "key", 1).result(SOON_S)
    assert others.result(SOON_S) == 1


def test_a_frozen_peer_does_not_hold_up_close(rpc_world: Rpc) -> None:
    """It holds a rollout that was offered, and never answers that it may drop it."""
    offer = rpc_world.transport.collect(rpc_world.peer, CollectRequest(LARGE)).result(SOON_S)
    rpc_world.kill(signal.SIGSTOP)
    offer.decline()
    closing = threading.Thread(target=rpc_world.transport.close, args=(0.1,))
    closing.start()
    closing.join(SOON_S)
    assert not closing.is_alive()


def test_one_agent_at_a_time_but_one_after_the_other() -> None:
    for _ in range(2):
        world = Rpc()
        try:
            with pytest.raises(dc.CollectorStateError, match="shut it down first"):
                RpcTransport(identity().trainer, address="127.0.0.1")
            assert world.transport.call(world.peer, Service.echo, 5).result(SOON_S) == (5,)
        finally:
            world.close()


def test_a_closed_transport_keeps_no_thread_though_someone_keeps_it() -> None:
    kept = []
    counts = []
    for _ in range(3):
        world = Rpc()
        world.close()
        kept.append(world.transport)
        counts.append(len(list(Path("/proc/self/task").iterdir())))
    assert counts[2] <= counts[0]  # some are torch's for good, from the first time on
    # Nor does it mind news of workers that came too late.
    kept[0].connect(world.peer, PeerAddress("nowhere"))
    kept[0].disconnect(world.peer)


def test_an_answer_that_cannot_travel_is_an_error(rpc_world: Rpc) -> None:
    with pytest.raises(dc.WorkerError):
        rpc_world.transport.call(rpc_world.peer, Service.lock).result(SOON_S)
