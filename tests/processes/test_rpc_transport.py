"""The transport over torch's RPC keeps the contract; then tests of its RRefs and its agents."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
from helpers.loopback_transport import answer_of
from helpers.transport_contract import LARGE, SMALL, SOON_S, TransportContract, check, num_threads
from helpers.transport_peer import Service
from helpers.transports import WITHOUT_RPC
from helpers.waiting import eventually

import distcollect as dc
from distcollect.common import tensor_cache
from distcollect.common.shared_memory import sample_of_memory
from distcollect.net.messages import PeerAddress
from distcollect.transport.protocol import NUM_SLABS, CollectRequest

if WITHOUT_RPC:
    pytest.skip("is about torch's RPC", allow_module_level=True)

from helpers.rpc_world import Rpc

from distcollect.transport import rpc_agents
from distcollect.transport.rpc import RpcTransport
from distcollect.transport.rpc_server import RpcServer


class TestRpc(TransportContract):
    make = Rpc


@pytest.fixture
def rpc() -> Iterator[Rpc]:
    world = Rpc()
    yield world
    world.close()


def num_rrefs(world: Rpc) -> tuple[int, int]:
    return cast("tuple[int, int]", world.call(Service.num_rrefs))


def test_a_rollout_that_stays_with_its_worker_is_an_rref_of_it(rpc: Rpc) -> None:
    """Torch itself counts them: each ends when it was fetched, or its memory is used again."""
    offered = rpc.offered
    small = offered(SMALL)
    assert num_rrefs(rpc) == (0, 0)
    first = offered(LARGE)
    assert num_rrefs(rpc) == (1, 1)
    check(answer_of(first.fetch).result(SOON_S), LARGE)
    check(answer_of(small.fetch).result(SOON_S), SMALL)
    assert num_rrefs(rpc) == (0, 0)
    declined = [offered(LARGE) for _ in range(20)]
    for offer in declined:
        offer.decline()
    assert num_rrefs(rpc) == (NUM_SLABS, NUM_SLABS)
    for offer in [offered(LARGE) for _ in range(NUM_SLABS)]:
        check(answer_of(offer.fetch).result(SOON_S), LARGE)
    assert num_rrefs(rpc) == (0, 0)


def test_a_rollout_is_handed_over_as_an_rref(rpc: Rpc) -> None:
    """Another transport fetches by it, once; then the worker says why it is gone."""
    transport, peer = rpc.transport, rpc.peer
    other = RpcTransport("127.0.0.1")
    try:
        other.connect(peer, transport.address_of(peer))
        held = transport.hand_over(peer, LARGE, "key", 60).result(SOON_S)
        assert num_rrefs(rpc) == (1, 1)
        held = pickle.loads(pickle.dumps(held))
        check(other.fetch_handover(peer, "key", held).result(SOON_S), LARGE)
        assert num_rrefs(rpc) == (0, 0)
        with pytest.raises(dc.WorkerError, match="it was taken already"):
            other.fetch_handover(peer, "key", held).result(SOON_S)
    finally:
        other.close()


def test_transports_share_an_agent_and_close_in_any_order() -> None:
    """A peer may even be known to both; what it owes to one is no matter of the other."""
    first, second = RpcTransport("127.0.0.1"), RpcTransport("127.0.0.1")
    world = Rpc()
    try:
        address = world.transport.address_of(world.peer)
        assert address is not None
        for transport in (first, second):
            transport.connect(world.peer, address)
        owed = {t: t.call(world.peer, Service.later, "key") for t in (first, world.transport)}
        lost = second.call(world.peer, Service.later, "never")
        second.close()
        with pytest.raises(dc.WorkerLost):
            lost.result(SOON_S)
        assert not any(answer.done() for answer in owed.values())
        second.connect(world.peer, address)
        with pytest.raises(dc.WorkerLost):
            second.call(world.peer, Service.echo).result(SOON_S)
        first.disconnect(world.peer)
        with pytest.raises(dc.WorkerLost):
            owed[first].result(SOON_S)
        first.close()
        world.call(Service.release, "key", 1)
        assert owed[world.transport].result(SOON_S) == 1
    finally:
        world.close()


def test_an_agent_of_somebody_else_is_refused() -> None:
    theirs = rpc_agents.RpcAgents("127.0.0.1")
    try:
        for _ in range(2):
            with pytest.raises(dc.CollectorStateError, match=r"was called\); shut it down first"):
                RpcTransport("127.0.0.1")
    finally:
        theirs.close(gently=True)
    RpcTransport("127.0.0.1").close()


def num_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("limit", ["_MAX_REMOVED", "_MAX_NUMBER"])
def test_peers_come_and_go_without_end(
    rpc: Rpc, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    """Torch's numbers of peers are used up, or connections are left over.

    What is owed still comes, the others remain, and nothing adds up.
    """
    transport, peer = rpc.transport, rpc.peer
    monkeypatch.setattr(rpc_agents, limit, 3)
    address = transport.address_of(peer)
    assert address is not None
    threads, files = num_threads(), num_files()
    owed = transport.call(peer, Service.later, "key")
    offer = rpc.offered(LARGE)
    for further in range(2**15 - 1, 2**15 + 20):  # as if each were another process
        transport.connect(further, address)
        assert transport.call(further, Service.echo, further).result(SOON_S) == (further,)
        transport.disconnect(further)
    check(answer_of(offer.fetch).result(SOON_S), LARGE)
    transport.call(peer, Service.release, "key", 1).result(SOON_S)
    assert owed.result(SOON_S) == 1

    for further in (2**15, 2**15 + 1):
        transport.connect(further, address)
    # Agents that nobody waits for have ended.
    eventually(lambda: num_threads() <= threads and num_files() <= files + 5 * 4)
    if limit == "_MAX_NUMBER":
        with pytest.raises(dc.LaunchError, match="3 processes are connected"):
            transport.connect(2**15 + 2, address)


def test_a_closed_transport_keeps_no_thread_though_someone_keeps_it() -> None:
    kept = []
    counts = []
    for _ in range(3):
        world = Rpc()
        world.close()
        kept.append(world.transport)
        counts.append(num_threads())
    assert counts[2] <= counts[0]  # some threads belong to torch and stay after the first time
    # Nor does it mind news of workers that came too late.
    kept[0].connect(world.peer, PeerAddress("nowhere"))
    kept[0].disconnect(world.peer)


def test_whatever_fails_while_a_rollout_is_copied_is_raised_where_it_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Here the peer is this process itself."""

    def no_memory(*_: object) -> None:
        raise MemoryError("no room")

    server = RpcServer(Service(), "127.0.0.1")
    transport = RpcTransport("127.0.0.1")
    try:
        transport.connect(1, PeerAddress(server.endpoint, sample_of_memory()))
        offers = [
            answer_of(transport.collect, 1, CollectRequest(LARGE)).result(SOON_S) for _ in range(2)
        ]
        check(answer_of(offers[0].fetch).result(SOON_S), LARGE)
        monkeypatch.setattr(tensor_cache, "copy_of", no_memory)
        with pytest.raises(MemoryError, match="no room"):
            answer_of(offers[1].fetch).result(SOON_S)
    finally:
        transport.close()
        server.close()
