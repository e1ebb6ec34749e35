"""What every transport does for its peers in the same way."""

from __future__ import annotations

import threading
from abc import abstractmethod
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from distcollect.common.waiting import settle
from distcollect.net.messages import PeerAddress
from distcollect.rollout.layout import Tensors
from distcollect.transport.copying import Copier, PeerMemory
from distcollect.transport.pending_answers import PendingAnswers
from distcollect.transport.protocol import Deliver, Offer, Transport


@dataclass(eq=False)
class Peer:
    """A process that can be called.

    Attributes:
        address: how it is reached.
        memory: its memory, if that can be mapped here.
    """

    address: PeerAddress

    def __post_init__(self) -> None:
        self.memory = PeerMemory.of(self.address.memory_sample)


P = TypeVar("P", bound=Peer)


class PeerTransport(Transport, Generic[P]):
    """A transport that knows its peers by their ids. :class:`Transport` documents the methods."""

    def __init__(self, pending: PendingAnswers) -> None:
        """Begin without peers; ``pending``: the answers that they owe."""
        self._pending = pending
        self._peers: dict[int, P] = {}
        self._lock = threading.Lock()  # held while peers are added, and while it is closed
        self._is_closed = False
        self._copier = Copier()

    def address_of(self, peer: int) -> PeerAddress | None:
        known = self._peers.get(peer)
        return None if known is None else known.address

    def shares_memory(self, peer: int) -> bool:
        known = self._peers.get(peer)
        return known is not None and known.memory is not None

    def host_key(self, peer: int) -> str | None:
        known = self._peers.get(peer)
        sample = None if known is None else known.address.memory_sample
        return None if sample is None else sample.host

    @abstractmethod
    def _ask(self, peer: int, question: tuple[Any, ...], deliver: Deliver) -> None:
        """Send a question to a peer; ``deliver`` gets the answer."""

    def _answer(self, peer: int, *question: Any) -> Future[Any]:
        """Send a question to a peer, and return its answer."""
        answer: Future[Any] = Future()
        self._ask(peer, question, partial(settle, answer))
        return answer

    def _rollout(self, peer: int, *question: Any) -> Future[Tensors]:
        """Send a question to a peer whose answer is a rollout, and return that."""
        fetched: Future[Tensors] = Future()
        copied = partial(self._copied, peer, self._peers.get(peer), partial(settle, fetched))
        self._ask(peer, question, copied)
        return fetched

    def _collect(
        self, peer: int, question: tuple[Any, ...], fetching: Any, deliver: Deliver
    ) -> None:
        """Ask for a rollout, and offer what comes: its header, and its tensors or their place.

        The question (fetching, place) asks for the tensors.
        """
        known = self._peers.get(peer)  # whose memory is read even if it is disconnected meanwhile

        def offer(sent: Any, error: BaseException | None) -> None:
            if error is not None:
                deliver(None, error)
                return
            header, *rest = sent

            def fetch(deliver: Deliver) -> None:
                copied = partial(self._copied, peer, known, deliver)
                if isinstance(rest[-1], list):
                    copied(rest[-1])
                else:
                    self._ask(peer, (fetching, rest[0]), copied)

            deliver(Offer(header, fetch), None)

        self._ask(peer, question, offer)

    def _copied(
        self,
        peer: int,
        known: P | None,
        deliver: Deliver,
        sent: list[Any],
        error: BaseException | None = None,
    ) -> None:
        """Deliver a rollout as it was sent, or the error in its place."""
        if error is not None:
            deliver(None, error)
        else:
            self._copier.deliver(peer, None if known is None else known.memory, sent, deliver)
