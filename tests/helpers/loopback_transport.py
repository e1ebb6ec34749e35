"""A transport inside one process, with the same contract as the others."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from distcollect.common.waiting import settle
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
        answer: Future[Any] = Future()
        self._ask(partial(settle, answer), peer, method, *args, **kwargs)
        return answer

    def _ask(
        self, deliver: Deliver, peer: int, method: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> None:
        answer = self._pending.expect(peer, deliver)
        service = self._services.get(peer)
        if service is None:
            self._pending.complete(answer, error=peer_is_gone(peer))
            return

        def arrived(done: Future[Any]) -> None:
            error = done.exception()
            if error is None:
                self._pending.complete(answer, done.result())
            else:
                failure = Failure.of(error, service.worker_id)
                self._pending.complete(answer, error=failure.error())

        call_service(service, method.__name__, args, kwargs).add_done_callback(arrived)

    def collect(self, peer: int, request: CollectRequest, deliver: Deliver) -> None:
        def offer(rollout: Any, error: BaseException | None) -> None:
            if error is None:
                header, tensors = rollout
                fetch = partial(self._deliver_copies, tensors, None)
                deliver(Offer(header, fetch), None)
            else:
                deliver(None, error)

        self._ask(offer, peer, WorkerService.collect, request)

    def hand_over(self, peer: int, sequence: int, key: str, keep_s: float) -> Future[str]:
        kept: Future[str] = Future()

        def deliver(_: None, error: BaseException | None) -> None:
            settle(kept, key, error)

        self._ask(deliver, peer, WorkerService.hand_over, sequence, key, keep_s)
        return kept

    def fetch_handover(self, peer: int, held: str) -> Future[Tensors]:
        fetched: Future[Tensors] = Future()

        def deliver(tensors: Tensors, error: BaseException | None) -> None:
            self._deliver_copies(tensors, error, partial(settle, fetched))

        self._ask(deliver, peer, WorkerService.read_handover, held, False)
        return fetched

    def _deliver_copies(
        self, tensors: Tensors, error: BaseException | None, deliver: Deliver
    ) -> None:
        if error is None:
            self.bytes_fetched += sum(tensor.nbytes for tensor in tensors)
            tensors = [tensor.clone() for tensor in tensors]
        deliver(tensors, error)

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


def pass_on(answer: Future[Any], deliver: Deliver) -> None:
    """Give ``deliver`` what a future gets."""

    def pass_it(done: Future[Any]) -> None:
        error = done.exception()
        deliver(None if error else done.result(), error)

    answer.add_done_callback(pass_it)
