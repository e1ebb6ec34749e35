"""A transport inside one process: for tests, with the same contract as the RPC one."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from distcollect.rollout.header import Header
from distcollect.rollout.layout import Tensors
from distcollect.transport.protocol import (
    CollectRequest,
    Failure,
    Offer,
    Pending,
    Service,
    as_future,
    lost,
)


class LoopbackTransport:
    """Calls services that live in this process."""

    def __init__(self) -> None:
        self._services: dict[int, Service] = {}
        self._pending = Pending()
        self.bytes_fetched = 0

    def connect(self, peer: int, service: Service) -> None:
        """Make ``service`` reachable as ``peer``."""
        self._services[peer] = service

    def call(self, peer: int, method: str, *args: Any) -> Future[Any]:
        """See :class:`~distcollect.transport.protocol.Transport`."""
        answer = self._pending.open(peer)
        service = self._services.get(peer)
        if service is None:
            self._pending.settle(answer, error=lost(peer))
            return answer

        def deliver(done: Future[Any]) -> None:
            error = done.exception()
            if error is None:
                self._pending.settle(answer, done.result())
            else:
                failure = Failure.of(error, service.worker_id)
                self._pending.settle(answer, error=failure.error())

        as_future(service, method, *args).add_done_callback(deliver)
        return answer

    def collect(self, peer: int, request: CollectRequest) -> Future[Offer]:
        """See :class:`~distcollect.transport.protocol.Transport`."""
        offer: Future[Offer] = Future()

        def deliver(done: Future[tuple[Header, Tensors]]) -> None:
            error = done.exception()
            if error is None:
                offer.set_result(_LoopbackOffer(self, *done.result()))
            else:
                offer.set_exception(error)

        self.call(peer, "collect", request).add_done_callback(deliver)
        return offer

    def contact(self, peer: int) -> Service | None:
        """See :class:`~distcollect.transport.protocol.Transport`."""
        return self._services.get(peer)

    def meet(self, peer: int, contact: Service) -> None:
        """See :class:`~distcollect.transport.protocol.Transport`."""
        self._services.setdefault(peer, contact)

    def take(self, peer: int, key: str) -> Future[Tensors]:
        """See :class:`~distcollect.transport.protocol.Transport`."""
        taken: Future[Tensors] = Future()

        def arrived(done: Future[Tensors]) -> None:
            error = done.exception()
            if error is None:
                copies = [tensor.clone() for tensor in done.result()]
                self.bytes_fetched += sum(tensor.nbytes for tensor in copies)
                taken.set_result(copies)
            else:
                taken.set_exception(error)

        self.call(peer, "take_over", key, False).add_done_callback(arrived)
        return taken

    def ping(self, peer: int) -> Future[Any]:
        """See :class:`~distcollect.transport.protocol.Transport`."""
        answer = self._pending.open(peer)
        error = None if peer in self._services else lost(peer)
        self._pending.settle(answer, error=error)
        return answer

    def is_near(self, peer: int) -> bool:
        """See :class:`~distcollect.transport.protocol.Transport`: no worker counts as near."""
        return False

    def evict(self, peer: int) -> None:
        """See :class:`~distcollect.transport.protocol.Transport`."""
        self._services.pop(peer, None)
        self._pending.fail(peer)

    def close(self, grace_s: float = 0) -> None:
        """See :class:`~distcollect.transport.protocol.Transport`."""
        self._pending.settled(grace_s)
        for peer in list(self._services):
            self.evict(peer)


class _LoopbackOffer:
    def __init__(self, transport: LoopbackTransport, header: Header, tensors: Tensors) -> None:
        self.header = header
        self._transport = transport
        self._tensors = tensors

    def fetch(self) -> Future[Tensors]:
        copies = [tensor.clone() for tensor in self._tensors]
        self._transport.bytes_fetched += self.header.num_bytes
        self._tensors = []
        done: Future[Tensors] = Future()
        done.set_result(copies)
        return done

    def decline(self) -> None:
        self._tensors = []
