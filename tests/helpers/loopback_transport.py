"""A transport inside one process, with the same contract as the others."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from distcollect.common.replies import Reply
from distcollect.rollout.header import Header
from distcollect.rollout.layout import Tensors
from distcollect.transport.failure import Failure
from distcollect.transport.pending_answers import PendingAnswers, peer_is_gone
from distcollect.transport.protocol import CollectRequest, Offer, Service, call_service
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
        self._services.setdefault(peer, address)

    def address_of(self, peer: int) -> Service | None:
        return self._services.get(peer)

    def call(self, peer: int, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
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
        def offer(rollout: tuple[Header, Tensors]) -> Offer:
            header, tensors = rollout
            return Offer(header, lambda: Reply.of(self._copies_of(tensors)))

        collected = self.call(peer, WorkerService.collect, request)
        return _then(collected, Reply(), offer)

    def hand_over(self, peer: int, sequence: int, key: str, keep_s: float) -> Future[str]:
        kept = self.call(peer, WorkerService.hand_over, sequence, key, keep_s)
        return _then(kept, Future(), lambda _: key)

    def fetch_handover(self, peer: int, held: str) -> Future[Tensors]:
        read = self.call(peer, WorkerService.read_handover, held, False)
        return _then(read, Future(), self._copies_of)

    def _copies_of(self, tensors: Tensors) -> Tensors:
        self.bytes_fetched += sum(tensor.nbytes for tensor in tensors)
        return [tensor.clone() for tensor in tensors]

    def ping(self, peer: int) -> Future[Any]:
        answer = self._pending.expect(peer, Future())
        error = None if peer in self._services else peer_is_gone(peer)
        self._pending.complete(answer, error=error)
        return answer

    def shares_memory(self, peer: int) -> bool:
        return False

    def host_key(self, peer: int) -> str | None:
        return self.hosts.get(peer)

    def disconnect(self, peer: int) -> None:
        self._services.pop(peer, None)
        self._pending.fail(peer)

    def close(self, grace_s: float = 0) -> None:
        self._pending.wait_for_all(grace_s)
        for peer in list(self._services):
            self.disconnect(peer)


def _then(done: Future[Any], answer: Any, read: Callable[[Any], Any]) -> Any:
    """Return ``answer``, which gets what ``read`` makes of the value once that is there."""

    def deliver(done: Future[Any]) -> None:
        error = done.exception()
        if error is None:
            answer.set_result(read(done.result()))
        else:
            answer.set_exception(error)

    done.add_done_callback(deliver)
    return answer
