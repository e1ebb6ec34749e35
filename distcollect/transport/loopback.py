"""A transport inside one process: for tests, with the same contract as the RPC one."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from distcollect.common.replies import Reply
from distcollect.rollout.header import Header
from distcollect.rollout.layout import Tensors
from distcollect.transport.protocol import (
    CollectRequest,
    Failure,
    Offer,
    PendingAnswers,
    Service,
    call_service,
    peer_is_gone,
)
from distcollect.transport.worker_service import WorkerService


class LoopbackTransport:
    """Calls services that live in this process; a service is its peer's address.

    Attributes:
        bytes_fetched: size of all rollouts that were fetched.
        hosts: maps peers to what :meth:`host_key` answers.
    """

    def __init__(self) -> None:
        self._services: dict[int, Service] = {}
        self._pending = PendingAnswers()
        self.bytes_fetched = 0
        self.hosts: dict[int, str] = {}

    def connect(self, peer: int, address: Service) -> None:
        """See :class:`~distcollect.transport.protocol.Transport`."""
        self._services.setdefault(peer, address)

    def address_of(self, peer: int) -> Service | None:
        """See :class:`~distcollect.transport.protocol.Transport`."""
        return self._services.get(peer)

    def call(self, peer: int, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        """See :class:`~distcollect.transport.protocol.Transport`."""
        answer = self._pending.expect(peer, Future())
        service = self._services.get(peer)
        if service is None:
            self._pending.complete(answer, error=peer_is_gone(peer))
            return answer

        def deliver(done: Future[Any]) -> None:
            error = done.exception()
            if error is None:
                self._pending.complete(answer, done.result())
            else:
                failure = Failure.of(error, service.worker_id)
                self._pending.complete(answer, error=failure.error())

        call_service(service, method.__name__, args, kwargs).add_done_callback(deliver)
        return answer

    def collect(self, peer: int, request: CollectRequest) -> Reply[Offer]:
        """See :class:`~distcollect.transport.protocol.Transport`."""
        offer: Reply[Offer] = Reply()

        def deliver(done: Future[tuple[Header, Tensors]]) -> None:
            error = done.exception()
            if error is None:
                offer.set_result(_LoopbackOffer(self, *done.result()))
            else:
                offer.set_exception(error)

        self.call(peer, WorkerService.collect, request).add_done_callback(deliver)
        return offer

    def hand_over(self, peer: int, sequence: int, key: str, keep_s: float) -> Future[str]:
        """See :class:`~distcollect.transport.protocol.Transport`: it answers the key."""
        return self.call(peer, WorkerService.hand_over, sequence, key, keep_s)

    def fetch_handover(self, peer: int, held: str) -> Future[Tensors]:
        """See :class:`~distcollect.transport.protocol.Transport`."""
        fetched: Future[Tensors] = Future()

        def arrived(done: Future[Tensors]) -> None:
            error = done.exception()
            if error is None:
                fetched.set_result(self.copies_of(done.result()))
            else:
                fetched.set_exception(error)

        self.call(peer, WorkerService.read_handover, held, False).add_done_callback(arrived)
        return fetched

    def copies_of(self, tensors: Tensors) -> Tensors:
        """What the trainer gets of a worker's tensors; counts their bytes."""
        self.bytes_fetched += sum(tensor.nbytes for tensor in tensors)
        return [tensor.clone() for tensor in tensors]

    def ping(self, peer: int) -> Future[Any]:
        """See :class:`~distcollect.transport.protocol.Transport`."""
        answer = self._pending.expect(peer, Future())
        error = None if peer in self._services else peer_is_gone(peer)
        self._pending.complete(answer, error=error)
        return answer

    def shares_memory(self, peer: int) -> bool:
        """See :class:`~distcollect.transport.protocol.Transport`: no worker counts as near."""
        return False

    def host_key(self, peer: int) -> str | None:
        """See :class:`~distcollect.transport.protocol.Transport`."""
        return self.hosts.get(peer)

    def disconnect(self, peer: int) -> None:
        """See :class:`~distcollect.transport.protocol.Transport`."""
        self._services.pop(peer, None)
        self._pending.fail(peer)

    def close(self, grace_s: float = 0) -> None:
        """See :class:`~distcollect.transport.protocol.Transport`."""
        self._pending.wait_for_all(grace_s)
        for peer in list(self._services):
            self.disconnect(peer)


class _LoopbackOffer:
    def __init__(self, transport: LoopbackTransport, header: Header, tensors: Tensors) -> None:
        self.header = header
        self._transport = transport
        self._tensors = tensors

    def fetch(self) -> Reply[Tensors]:
        tensors, self._tensors = self._tensors, []
        return Reply.of(self._transport.copies_of(tensors))

    def decline(self) -> None:
        self._tensors = []
