"""The transport over the connections by which workers join, the trainer's side of it.

Each worker has one connection with its trainer, and calls and rollouts go over it too, as
:class:`packets <distcollect.net.framing.Packet>`. The thread of the join server reads them all.
A question has a number; its answer has the same::

    trainer                                  worker
    (CALL, method, args, kwargs)  ─────────▶
                                  ◀─────────  the value, or a Failure
    (COLLECT, *request)           ─────────▶
                                  ◀─────────  the header, and its tensors if they are small
    (FETCH, number of a COLLECT)  ─────────▶
                                  ◀─────────  the tensors, or a Failure
    (PING,)                       ─────────▶
                                  ◀─────────  None

What is asked and answered is pickled, but for the memory of tensors (:mod:`.packing`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distcollect.common import tensor_cache
from distcollect.net.framing import Buffer, Packet
from distcollect.net.messages import PeerAddress
from distcollect.net.server import Connection
from distcollect.rollout.layout import Tensors
from distcollect.transport import packing
from distcollect.transport.peer_connection import PeerConnection
from distcollect.transport.peer_transport import Peer, PeerTransport
from distcollect.transport.pending_answers import PendingAnswer, PendingAnswers, peer_is_gone
from distcollect.transport.protocol import CollectRequest, Deliver
from distcollect.transport.tcp_server import Question
from distcollect.transport.worker_service import WorkerService

# A rollout comes along with its header up to the first, but no more than the second if all workers
# send one at the same time. To fetch it would take about as long as to send so much.
_INLINE_BYTES, _INLINE_BYTES_OF_ALL = 1 << 20, 64 << 20
_NAME = "this trainer, which takes a rollout over from a worker of another one,"
# In /proc/PID/stat: stopped, also by a debugger, or ended.
_NOT_ALIVE = frozenset("TtZX")


@dataclass(eq=False)
class _Peer(Peer):
    """A worker's process.

    Attributes:
        peer: its id.
        connection: with it.
        pending: the answers that are still to come, of all processes.
    """

    peer: int
    connection: Connection | PeerConnection
    pending: PendingAnswers

    def __post_init__(self) -> None:
        super().__post_init__()
        self._numbers = itertools.count()
        self._open: dict[int, PendingAnswer] = {}

    allocate = staticmethod(tensor_cache.block)

    def ask(self, question: Sequence[Buffer], answer: PendingAnswer) -> None:
        """Send a question, which was packed.

        Raises:
            OSError: the process is gone.
        """
        number = next(self._numbers)
        self._open[number] = answer
        self.connection.send_packet(Packet(number, question))

    def received(self, packet: Packet) -> None:
        if (answer := self._open.pop(packet.number, None)) is None:
            return
        try:
            outcome = packing.unpack(packet.parts)
        except Exception as error:  # noqa: BLE001 - raised where the answer is waited for
            self.pending.complete(answer, error=error)
        else:
            self.pending.complete(answer, outcome)

    def ended(self) -> None:
        # Not all answers of the peer: there may be a newer connection with it.
        for answer in list(self._open.values()):
            self.pending.complete(answer, error=peer_is_gone(self.peer))

    @property
    def is_seen_alive(self) -> bool:
        """Return True if this process sees that it runs, whatever its Python does meanwhile."""
        connection = self.connection
        if not (isinstance(connection, Connection) and connection.is_own):
            return False
        try:
            stat = Path(f"/proc/{connection.hello.pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] not in _NOT_ALIVE


class TcpTransport(PeerTransport[_Peer]):
    """Calls workers by their connections. :class:`Transport` documents the methods."""

    name = "tcp"
    carries_weights = True

    def __init__(self, token: str) -> None:
        """``token``: that the workers of other trainers want to see proven."""
        super().__init__(PendingAnswers())
        self._token = token

    def connect(
        self, peer: int, address: PeerAddress, connection: Connection | None = None
    ) -> None:
        with self._lock:
            if peer in self._peers or self._is_closed or not (connection or address.endpoint):
                return
            by = connection or PeerConnection(address.endpoint, self._token, _NAME)
            known = self._peers[peer] = _Peer(address, peer, by, self._pending)
        by.carry(known)

    def call(self, peer: int, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        return self._answer(peer, Question.CALL, method.__name__, args, kwargs)

    def collect(self, peer: int, request: CollectRequest, deliver: Deliver) -> None:
        inline_bytes = min(_INLINE_BYTES, _INLINE_BYTES_OF_ALL // (len(self._peers) or 1))
        question = (Question.COLLECT, *request[:-2], self.shares_memory(peer), inline_bytes)
        self._collect(peer, question, Question.FETCH, deliver)

    def hand_over(self, peer: int, sequence: int, key: str, keep_s: float) -> Future[Any]:
        return self.call(peer, WorkerService.hand_over, sequence, key, keep_s)

    def fetch_handover(self, peer: int, key: str, held: Any) -> Future[Tensors]:
        args = (key, self.shares_memory(peer))
        return self._rollout(peer, Question.CALL, WorkerService.read_handover.__name__, args, {})

    def ping(self, peer: int) -> Future[Any]:
        known = self._peers.get(peer)
        if known is None or not known.is_seen_alive:
            return self._answer(peer, Question.PING)
        answer: Future[Any] = Future()
        answer.set_result(None)
        return answer

    def disconnect(self, peer: int) -> None:
        with self._lock:
            known = self._peers.pop(peer, None)
        if known is not None:
            known.connection.carry(None)
        self._pending.fail(peer)

    def close(self, grace_s: float = 0) -> None:
        with self._lock:
            self._is_closed = True
        self._pending.wait_for_all(grace_s)
        for peer in list(self._peers):
            self.disconnect(peer)
        self._copier.close()  # at last: no more rollouts arrive

    def _ask(self, peer: int, question: tuple[Any, ...], deliver: Deliver) -> None:
        answer = self._pending.expect(peer, deliver)
        try:
            parts = packing.pack(question)
        except Exception as error:  # noqa: BLE001 - raised where the answer is waited for
            self._pending.complete(answer, error=error)
            return
        try:
            self._peers[peer].ask(parts, answer)
        except (KeyError, OSError) as error:
            self._pending.complete(answer, error=peer_is_gone(peer, error))
