"""A transport inside one process, with the same contract as the others."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from distcollect.common.waiting import settle
from distcollect.rollout.header import Header
from distcollect.rollout.layout import Tensors
from distcollect.transport.failure import Failure
from distcollect.transport.pending_answers import PendingAnswers, peer_is_gone
from distcollect.transport.protocol import (
    CollectRequest,
    Deliver,
    Offer,
    Service,
    call_service,
)
from distcollect.transport.worker_service import WorkerService


class LoopbackTransport:
    """Calls services that live in this process; a service is its peer's address.

    Attributes:
        bytes_fetched: size of all rollouts that were fetched.
        hosts: maps peers to what :meth:`host_key` answers.
    """

    name = "loopback"
    carries_weights = False

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
        future: Future[Any] = Future()
        answer = self._pending.expect(peer, partial(settle, future))
        service = self._services.get(peer)
        if service is None:
            self._pending.complete(answer, error=peer_is_gone(peer))
            return future

        def arrived(value: Any, error: BaseException | None) -> None:
            if error is not None:
                error = Failure.of(error, service.worker_id).error()
            self._pending.complete(answer, value, error)

        pass_on(call_service(service, method.__name__, args, kwargs), arrived)
        return future

    def collect(self, peer: int, request: CollectRequest, deliver: Deliver) -> None:
        def offer(rollout: tuple[Header, Tensors]) -> Offer:
            header, tensors = rollout
            return Offer(header, lambda deliver: deliver(self._copies_of(tensors), None))

        pass_on(self.call(peer, WorkerService.collect, request), deliver, offer)

    def hand_over(self, peer: int, sequence: int, key: str, keep_s: float) -> Future[None]:
        return self.call(peer, WorkerService.hand_over, sequence, key, keep_s)

    def fetch_handover(self, peer: int, key: str, held: None) -> Future[Tensors]:
        read = self.call(peer, WorkerService.read_handover, key, False)
        return answer_of(lambda deliver: pass_on(read, deliver, self._copies_of))

    def _copies_of(self, tensors: Tensors) -> Tensors:
        self.bytes_fetched += sum(tensor.nbytes for tensor in tensors)
        return [tensor.clone() for tensor in tensors]

    def ping(self, peer: int) -> Future[Any]:
        answer: Future[Any] = Future()
        settle(answer, None, None if peer in self._services else peer_is_gone(peer))
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


def answer_of(ask: Callable[..., object], *args: Any) -> Future[Any]:
    """Call a method that takes a :data:`Deliver` last; return the answer as a future."""
    answer: Future[Any] = Future()
    ask(*args, partial(settle, answer))
    return answer


def pass_on(
    answer: Future[Any], deliver: Deliver, read: Callable[[Any], Any] = lambda value: value
) -> None:
    """Give ``deliver`` what ``read`` makes of the value that a future gets, or the error."""

    def arrived(done: Future[Any]) -> None:
        error = done.exception()
        deliver(None if error else read(done.result()), error)

    answer.add_done_callback(arrived)
