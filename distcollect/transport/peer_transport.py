"""What every transport does for its peers in the same way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from distcollect.net.messages import PeerAddress
from distcollect.transport.copying import Copier, PeerMemory
from distcollect.transport.pending_answers import PendingAnswers
from distcollect.transport.protocol import Deliver, Offer, Transport


class Peer(Protocol):
    """A process that can be called.

    Attributes:
        address: how it is reached.
        memory: its memory, if that can be mapped here.
    """

    address: PeerAddress
    memory: PeerMemory | None


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

    def _offered(self, peer: int, ask: Callable[[Any, Deliver], None], deliver: Deliver) -> Deliver:
        """Return what offers the answer: a header, and its tensors or by what ``ask`` gets them."""
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
                    ask(rest[0], copied)

            deliver(Offer(header, fetch), None)

        return offer

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
