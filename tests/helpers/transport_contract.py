"""The contract that all transports keep."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import transport_peer
from helpers.join_server import TOKEN, Recorder
from helpers.loopback_transport import LoopbackTransport, answer_of
from helpers.transport_peer import WORKER_ID, Service, rollout
from helpers.waiting import stop_process

import distcollect as dc
from distcollect.common.peer_ids import identity
from distcollect.net.messages import PeerAddress
from distcollect.net.server import JoinServer
from distcollect.net.tls import trainer_tls
from distcollect.transport.protocol import CollectRequest, Offer
from distcollect.transport.tcp import TcpTransport

SOON_S = 60
SMALL, LARGE = 100, 200_000


class World:
    """A transport and a peer of it."""

    transport: Any
    peer: int

    @staticmethod
    def send_by_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
        """Let the peers that are added from now on send by sockets alone."""

    def call(self, method: Callable[..., Any], *args: Any) -> Any:
        """Call the peer and wait for the answer."""
        return self.transport.call(self.peer, method, *args).result(SOON_S)

    def offered(self, num_steps: int, **request: Any) -> Offer:
        """Have the peer collect a rollout."""
        wanted = CollectRequest(num_steps, **request)
        return answer_of(self.transport.collect, self.peer, wanted).result(SOON_S)

    def close(self) -> None:
        self.transport.close()


class Loopback(World):
    """A transport with a peer in this process."""

    def __init__(self) -> None:
        self.transport = LoopbackTransport()
        self.peer = 1
        self.transport.connect(self.peer, Service())

    def sent_bytes(self) -> int:
        return self.transport.bytes_fetched


class Processes(World):
    """A transport with peers in other processes.

    They are forked from one that has imported torch, which takes longer than most tests.
    """

    def __init__(self) -> None:
        self.processes: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []
        self.peer = self.add_peer()

    def add_peer(self, is_mapped: bool = False) -> int:
        """Start a peer; ``is_mapped``: its memory is."""
        raise NotImplementedError

    def start(self, serve: Callable[..., None], *args: object) -> Connection:
        """Run ``serve`` in a process; return what it may tell by."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([transport_peer.__name__])
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
            patch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")
            forkserver.ensure_running()
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, *args))
        process.start()
        theirs.close()
        self.processes.append((process, ours))
        return ours

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    @property
    def pid(self) -> int:
        pid = self.processes[0][0].pid
        assert pid is not None
        return pid

    def stop(self) -> None:
        stop_process(self.pid)

    def close(self) -> None:
        super().close()
        for process, pipe in self.processes:
            process.kill()
            process.join()
            pipe.close()


class Tcp(Processes):
    security = "token"

    def __init__(self) -> None:
        self.transport = TcpTransport(TOKEN)
        self.events = Recorder()
        tls = trainer_tls("127.0.0.1", self.security)
        self.server = JoinServer("127.0.0.1", TOKEN, self.events, tls=tls)
        super().__init__()

    def add_peer(self, is_mapped: bool = False) -> int:
        process = self.start(transport_peer.serve_tcp, self.server.port, TOKEN)
        connection = self.connection = self.events.next("admitted")
        peer = identity().new_peer()
        endpoint, sample = process.recv()
        address = PeerAddress(endpoint, sample if is_mapped else None)
        self.transport.connect(peer, address, connection)
        return peer

    def sent_bytes(self) -> int:
        """The bytes that have come by the peer's connection, in the kernel's struct tcp_info."""
        with socket.socket(fileno=os.dup(self.connection.sock.fileno())) as sock:
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
        return int(struct.unpack_from("Q", info, 128)[0])

    def close(self) -> None:
        super().close()
        self.server.close()


class Tls(Tcp):
    security = "tls"


def num_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def check(tensors: list[torch.Tensor], num_steps: int) -> None:
    expected = rollout(num_steps)
    assert [t.dtype for t in tensors] == [t.dtype for t in expected]
    assert [t.shape for t in tensors] == [t.shape for t in expected]
    assert all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True))


def no_such_method(service: Any) -> None: ...


class TransportContract:
    """Each transport has a class of tests that derives from this one.

    Starting a peer takes two seconds over RPC, so each test checks several things.
    """

    make: Any

    @pytest.fixture
    def world(self) -> Iterator[Any]:
        world = type(self).make()
        yield world
        world.close()

    def test_calls(self, world: Any) -> None:
        assert world.call(Service.echo, 1, "two", None) == (1, "two", None)
        for method in (Service.fail, Service.fail_later):
            with pytest.raises(dc.WorkerError, match="ValueError: of no value") as caught:
                world.call(method, "of no value")
            assert caught.value.worker_id == WORKER_ID
            assert "in fail\n" in caught.value.remote_traceback
            assert not isinstance(caught.value, dc.WorkerLost)
        # Nor may a method be called that the service has, and doesn't serve.
        for method in (no_such_method, Service.not_served):
            with pytest.raises(dc.WorkerError, match=method.__name__):
                world.call(method)
        # More open calls than any thread pool has threads.
        later = [world.transport.call(world.peer, Service.later, f"key{i}") for i in range(20)]
        assert world.call(Service.echo) == ()
        assert not any(answer.done() for answer in later)
        for i in reversed(range(20)):
            world.call(Service.release, f"key{i}", i)
        assert [answer.result(SOON_S) for answer in later] == list(range(20))

    @pytest.mark.parametrize("num_steps", [0, SMALL, LARGE])
    def test_a_rollout_is_offered_then_fetched(self, world: Any, num_steps: int) -> None:
        offer = world.offered(num_steps)
        assert (offer.header.num_frames, offer.header.policy_version) == (num_steps, (3, 5))
        tensors = answer_of(offer.fetch).result(SOON_S)
        check(tensors, num_steps)
        for tensor in tensors:
            tensor.zero_()  # they belong to us: the next rollout does not change them
        check(answer_of(world.offered(num_steps).fetch).result(SOON_S), num_steps)
        with pytest.raises(dc.WorkerError, match="no rollout today"):
            world.offered(1, random=True)

    def test_a_declined_rollout_moves_no_bytes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Over RPC the peer sends only through its sockets here; the kernel counts the bytes."""
        type(self).make.send_by_sockets(monkeypatch)
        world = type(self).make()
        try:
            size = sum(tensor.nbytes for tensor in rollout(LARGE))
            world.call(Service.echo)

            def cost(wanted: bool) -> int:
                before = world.sent_bytes()
                offer = world.offered(LARGE)
                assert offer.header.num_bytes == size
                if wanted:
                    check(answer_of(offer.fetch).result(SOON_S), LARGE)
                else:
                    offer.decline()
                del offer
                world.call(Service.echo)
                return world.sent_bytes() - before

            assert cost(wanted=True) >= size
            assert cost(wanted=False) < size / 100
            assert cost(wanted=True) >= size
        finally:
            world.close()

    def test_disconnecting_a_peer_fails_what_it_owes(self, world: Any) -> None:
        pending = world.transport.call(world.peer, Service.later, "never")
        unfetched = world.offered(SMALL)
        world.transport.disconnect(world.peer)
        for answer in (
            pending,
            world.transport.call(world.peer, Service.echo),
            answer_of(world.transport.collect, world.peer, CollectRequest(SMALL)),
            world.transport.ping(world.peer),
            world.transport.call(world.peer + 12_345, Service.echo),  # no peer ever had this id
        ):
            with pytest.raises(dc.WorkerLost):
                answer.result(1)
        world.transport.disconnect(world.peer)
        unfetched.decline()

    def test_closing_waits_for_answers_that_are_owed(self, world: Any) -> None:
        owed = world.transport.call(world.peer, Service.soon, "here it is")
        world.transport.close(SOON_S)
        assert owed.result(0) == "here it is"
        world.transport.close()
        with pytest.raises(dc.WorkerLost):
            world.call(Service.echo)

    def test_closing_fails_answers_that_do_not_come(self, world: Any) -> None:
        owed = world.transport.call(world.peer, Service.later, "never")
        world.transport.close(0.1)
        with pytest.raises(dc.WorkerLost):
            owed.result(1)
