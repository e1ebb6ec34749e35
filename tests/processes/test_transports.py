"""The transports between processes keep the contract; then tests of what is their own."""

from __future__ import annotations

import importlib
import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from helpers.join_server import TOKEN
from helpers.loopback_transport import answer_of
from helpers.transport_contract import (
    LARGE,
    SMALL,
    SOON_S,
    Processes,
    Tcp,
    Tls,
    TransportContract,
    check,
    num_threads,
)
from helpers.transport_peer import Service
from helpers.transports import WITHOUT_RPC
from helpers.waiting import eventually

import distcollect as dc
from distcollect.transport.protocol import NUM_SLABS
from distcollect.transport.tcp import TcpTransport
from distcollect.weights.updaters import InlineSource

MEDIUM = 27_000  # steps of 37 bytes
WORLDS = [Tcp, Tls]
if not WITHOUT_RPC:
    WORLDS.append(importlib.import_module("helpers.rpc_world").Rpc)


class TestTcp(TransportContract):
    make = Tcp


class TestTls(TransportContract):
    make = Tls


@pytest.fixture(params=WORLDS)
def world(request: pytest.FixtureRequest) -> Iterator[Processes]:
    world: Processes = request.param()
    yield world
    world.close()


def test_a_rollout_can_be_fetched_until_its_memory_is_used_again(world: Processes) -> None:
    forgotten, *_ = [world.offered(LARGE) for _ in range(1 + NUM_SLABS)]
    with pytest.raises(dc.WorkerError, match="its memory has been used again"):
        answer_of(forgotten.fetch).result(SOON_S)
    unfetched = world.offered(LARGE)
    check(answer_of(world.offered(LARGE).fetch).result(SOON_S), LARGE)
    check(answer_of(unfetched.fetch).result(SOON_S), LARGE)


@pytest.mark.parametrize("world", [Tcp, Tls], indirect=True)
def test_a_rollout_of_medium_size_comes_with_its_header(world: Processes) -> None:
    """It is fetched without its worker."""
    offer = world.offered(MEDIUM)
    others = [world.offered(SMALL) for _ in range(NUM_SLABS)]  # its memory is used again
    world.stop()
    check(answer_of(offer.fetch).result(SOON_S), MEDIUM)
    for other in others:
        check(answer_of(other.fetch).result(SOON_S), SMALL)


@pytest.mark.parametrize("make", [Tcp, Tls])
def test_another_trainer_takes_a_rollout_by_a_connection_of_its_own(make: type[Tcp]) -> None:
    """If it knows the token; until the worker ends."""
    world = make()
    other, stranger = TcpTransport(TOKEN), TcpTransport("another token")
    try:
        peer, begin = world.peer, num_threads()
        address = world.transport.address_of(peer)
        held = world.transport.hand_over(peer, LARGE, "key", 60).result(SOON_S)
        for transport in (stranger, other):
            transport.connect(peer, address)
        with pytest.raises(dc.WorkerLost):
            stranger.fetch_handover(peer, "key", held).result(SOON_S)
        with pytest.raises(dc.WorkerLost):  # nor is it owed what it asks for later
            stranger.call(peer, Service.echo).result(SOON_S)
        check(other.fetch_handover(peer, "key", held).result(SOON_S), LARGE)
        with pytest.raises(dc.WorkerError, match="it was taken already"):
            other.fetch_handover(peer, "key", held).result(SOON_S)
        # Its own trainer is not affected by what becomes of the connection.
        other.disconnect(peer)
        world.call(Service.echo)
        for _ in range(30):  # nor the next connection by the end of the one before
            other.connect(peer, address)
            other.call(peer, Service.echo).result(SOON_S)
            other.disconnect(peer)
        other.connect(peer, address)
        owed = other.call(peer, Service.later, "never")
        other.call(peer, Service.echo).result(SOON_S)
        world.kill()
        with pytest.raises(dc.WorkerLost):
            owed.result(SOON_S)
        with pytest.raises(dc.WorkerLost):
            other.call(peer, Service.echo).result(SOON_S)
        for transport in (stranger, other):
            transport.close()
        eventually(lambda: num_threads() <= begin)
    finally:
        world.close()


def test_a_rollout_in_the_memory_of_a_peer_that_is_gone_is_fetched_from_there(
    world: Processes,
) -> None:
    """What came with the header are the places of its tensors, which must not be taken for them."""
    world.peer = world.add_peer(is_mapped=True)
    for num_steps in (SMALL, LARGE):
        check(answer_of(world.offered(num_steps).fetch).result(SOON_S), num_steps)
    offer = world.offered(LARGE)
    world.transport.disconnect(world.peer)
    check(answer_of(offer.fetch).result(SOON_S), LARGE)


def test_what_cannot_travel_is_an_error_and_nothing_is_owed(world: Processes) -> None:
    with pytest.raises(dc.WorkerError):
        world.call(Service.lock)
    with pytest.raises(TypeError, match="pickle"):
        world.call(Service.echo, threading.Lock())
    begin = time.monotonic()
    world.transport.close(SOON_S)
    assert time.monotonic() - begin < SOON_S / 2


@pytest.mark.parametrize("world", [Tcp, Tls], indirect=True)
def test_a_call_does_not_wait_for_weights_that_are_on_their_way(world: Processes) -> None:
    """Though these were sent before, and their receiver has taken little of them."""
    payload = torch.arange(4_000_000, dtype=torch.int64).view(torch.uint8)
    answered: list[str] = []
    world.stop()
    weights = world.transport.call(world.peer, Service.echo, InlineSource(payload))
    call = world.transport.call(world.peer, Service.echo, "small")
    weights.add_done_callback(lambda _: answered.append("weights"))
    call.add_done_callback(lambda _: answered.append("call"))
    os.kill(world.pid, signal.SIGCONT)
    [source] = weights.result(SOON_S)
    assert call.result(SOON_S) == ("small",)
    assert answered == ["call", "weights"]
    assert torch.equal(source.arrived, payload)
    source.arrived.zero_()  # it belongs to us


def test_kill_9_fails_what_is_owed(world: Processes) -> None:
    """Also where nobody disconnects the peer; the others are not affected."""
    other = world.add_peer()
    pending = [world.transport.call(world.peer, Service.later, str(i)) for i in range(3)]
    others = world.transport.call(other, Service.later, "key")
    world.call(Service.echo)
    world.kill()
    for answer in pending:
        with pytest.raises(dc.WorkerLost):
            answer.result(SOON_S)
    world.transport.disconnect(world.peer)
    world.transport.call(other, Service.release, "key", 1).result(SOON_S)
    assert others.result(SOON_S) == 1


def test_a_frozen_peer_does_not_hold_up_close(world: Processes) -> None:
    """The peer holds an offered rollout, and never answers."""
    offer = world.offered(LARGE)
    world.stop()
    offer.decline()
    closing = threading.Thread(target=world.transport.close, args=(0.1,))
    closing.start()
    closing.join(SOON_S)
    assert not closing.is_alive()
