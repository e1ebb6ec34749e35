"""The transport over ``torch.distributed.rpc``, the trainer's side of it.

Only this module, :mod:`.rpc_server` and :mod:`.rpc_agents` touch torch's RPC.

Hub and spoke: a trainer is connected to each of its workers, and a worker to nobody: it answers on
the connection that a call came on. Each process runs its own TensorPipe agent over a private
in-process store; where a worker's agent listens comes in the join handshake. So no process waits
for a global group: joining is O(1), and a worker's death affects its trainer only. This needs a few
private symbols of torch, see :mod:`.rpc_agents`.

The ``shm`` transport and channel are left out, as their reactor thread polls: it would use half a
core or more in every process that waits.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

from distcollect.net.messages import PeerAddress
from distcollect.net.server import Connection
from distcollect.rollout.layout import Tensors
from distcollect.transport.peer_transport import PeerTransport
from distcollect.transport.pending_answers import PendingAnswers, peer_is_gone
from distcollect.transport.protocol import CollectRequest, Deliver
from distcollect.transport.rpc_agents import PING, AgentPeer, join_agents, leave_agents
from distcollect.transport.rpc_server import (
    serve_call,
    serve_collect,
    serve_hand_over,
    serve_rollout,
)


class RpcTransport(PeerTransport[AgentPeer]):
    """Calls peers; all of a process share its agent. :class:`Transport` documents the methods."""

    name = "rpc"
    carries_weights = False

    def __init__(self, address: str) -> None:
        """Start; the rest is as in :func:`.join_agents`."""
        pending = PendingAnswers()
        self._agents = join_agents(address, pending)
        super().__init__(pending)

    def connect(
        self, peer: int, address: PeerAddress, connection: Connection | None = None
    ) -> None:
        with self._lock:
            if peer not in self._peers and not self._is_closed:
                self._peers[peer] = self._agents.add(address)

    def call(self, peer: int, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        return self._answer(peer, serve_call, method.__name__, args, kwargs)

    def collect(self, peer: int, request: CollectRequest, deliver: Deliver) -> None:
        request = request._replace(shared=self.shares_memory(peer))
        self._collect(peer, (serve_collect, request), serve_rollout, deliver)

    def hand_over(self, peer: int, sequence: int, key: str, keep_s: float) -> Future[Any]:
        return self._answer(peer, serve_hand_over, sequence, key, keep_s)

    def fetch_handover(self, peer: int, key: str, held: Any) -> Future[Tensors]:
        return self._rollout(peer, serve_rollout, held, key, self.shares_memory(peer))

    def ping(self, peer: int) -> Future[Any]:
        # An operator of torch's is answered without the peer's interpreter, whose lock an env may
        # hold.
        return self._answer(peer, torch.add, *PING)

    def disconnect(self, peer: int) -> None:
        with self._lock:
            known = self._peers.pop(peer, None)
        if known is not None:
            self._agents.remove(known)
        self._pending.fail(peer)

    def close(self, grace_s: float = 0) -> None:
        with self._lock:
            self._is_closed = True
            peers, self._peers = self._peers, {}
        self._pending.wait_for_all(grace_s)
        self._copier.close()
        for known in peers.values():
            self._agents.remove(known, has_ended=False)
        leave_agents(self._agents, self._pending)
        for peer in peers:
            self._pending.fail(peer)

    def _ask(self, peer: int, question: tuple[Any, ...], deliver: Deliver) -> None:
        # A question is a function, which is called in the peer's process, and its arguments.
        function, *args = question
        answer = self._pending.expect(peer, deliver)

        def arrived(done: torch.futures.Future[Any]) -> None:
            try:
                outcome = done.value()
            except Exception as error:  # noqa: BLE001 - torch has no type for a broken connection
                self._pending.complete(answer, error=peer_is_gone(peer, error))
                return
            self._pending.complete(answer, outcome)

        try:
            self._agents.call(self._peers[peer], function, tuple(args)).add_done_callback(arrived)
        except (KeyError, RuntimeError) as error:
            self._pending.complete(answer, error=peer_is_gone(peer, error))
        except Exception as error:  # noqa: BLE001 - an argument can't be pickled: nothing was sent
            self._pending.complete(answer, error=error)
