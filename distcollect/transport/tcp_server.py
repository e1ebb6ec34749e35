"""The worker's side of the transport over the connections by which workers join: :mod:`.tcp`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from distcollect.common import tensor_cache
from distcollect.errors import RolloutGone
from distcollect.net.client import ControlConnection
from distcollect.net.framing import Packet
from distcollect.net.server import Connection
from distcollect.rollout.header import Header
from distcollect.rollout.layout import Tensors
from distcollect.transport import packing
from distcollect.transport.failure import Failure
from distcollect.transport.protocol import NUM_SLABS, CollectRequest, Service, call_service
from distcollect.transport.worker_service import WorkerService


class Question:
    """What a trainer asks; see :mod:`.tcp`. Numbers, which are pickled and unpickled fast."""

    CALL, COLLECT, FETCH, PING = range(4)


class TcpServer:
    """Answers the questions that come on a worker's connection, as its packets.

    Attributes:
        endpoint: "", as its trainer does not have to connect.
    """

    endpoint = ""

    def __init__(self, service: Service, connection: ControlConnection | Connection) -> None:
        """Answer as soon as somebody reads from ``connection``."""
        self._service = service
        self._connection = connection
        # The last rollouts, by the number of the question; None: it needs no fetching any more.
        self._offered: dict[int, Tensors | None] = {}
        self._lock = threading.Lock()  # of these
        connection.carry(self)

    allocate = staticmethod(tensor_cache.block)

    def close(self) -> None:
        """Do nothing: what serves the connection ends with it."""

    def ended(self) -> None:
        """Do nothing: the process ends with its connection."""

    def received(self, packet: Packet) -> None:
        number = packet.number
        try:
            kind, *args = packing.unpack(packet.parts)
        except Exception as error:  # noqa: BLE001 - it is sent to the trainer
            self._fail(number, error)
            return
        if kind == Question.CALL:
            self._call(number, *args)
        elif kind == Question.COLLECT:
            request = CollectRequest(*args)
            offer = partial(self._offer, number, request)
            self._call(number, WorkerService.collect.__name__, (request,), {}, offer)
        elif kind == Question.FETCH:
            self._send_rollout(number, *args)
        else:
            self._answer(number, None)

    def _call(
        self,
        number: int,
        method: str,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        package: Callable[[Any], Any] = lambda value: value,
    ) -> None:
        def deliver(done: Future[Any]) -> None:
            error = done.exception()
            if error is not None:
                self._fail(number, error)
            else:
                self._answer(number, package(done.result()))

        call_service(self._service, method, args, kwargs).add_done_callback(deliver)

    def _offer(
        self, number: int, request: CollectRequest, rollout: tuple[Header, Tensors]
    ) -> tuple[Header, int, Tensors | None]:
        """Return what is sent of a rollout with its header: its tensors, if they are small."""
        header, tensors = rollout
        is_inline = request.is_inline(tensors)
        with self._lock:
            self._offered[number] = None if is_inline else tensors
            for old in list(self._offered)[:-NUM_SLABS]:
                del self._offered[old]  # its memory may be written to now
        return header, number, tensors if is_inline else None

    def _send_rollout(self, number: int, offered: int) -> None:
        with self._lock:
            if (tensors := self._offered.get(offered)) is not None:
                self._offered[offered] = None
        if tensors is None:
            self._fail(number, RolloutGone("its memory has been used again"))
        else:
            self._answer(number, tensors)

    def _answer(self, number: int, value: object) -> None:
        try:
            parts = packing.pack(value)
        except Exception as error:  # noqa: BLE001 - it is sent to the trainer
            parts = packing.pack(Failure.of(error, self._service.worker_id))
        with contextlib.suppress(OSError):  # the trainer is gone
            self._connection.send_packet(Packet(number, parts))

    def _fail(self, number: int, error: BaseException) -> None:
        self._answer(number, Failure.of(error, self._service.worker_id))
