"""What supervision asks of the pool, and what the pool asks of supervision."""

from __future__ import annotations

from typing import Protocol


class MembershipObserver(Protocol):
    """Whoever works with the workers: the pool. Called on one thread."""

    def join(self, worker_id: int, incarnation: int, peer: int) -> None:
        """A worker is there, and was tried out."""

    def leave(self, worker_id: int, incarnation: int) -> None:
        """It is to leave: ask it for nothing more, and say ``drained`` when it owes nothing."""

    def lose(self, worker_id: int, incarnation: int, *, replaced: bool) -> None:
        """It is gone; ``replaced``: another one is on its way to this slot."""

    def account(self, worker_id: int, incarnation: int, cause: str, stepped: int | None) -> None:
        """It is gone for ``cause``, and had stepped so many frames; None: nobody can say."""

    def fail(self, error: BaseException) -> None:
        """The run can't go on."""


class FailureSink(Protocol):
    """What the pool tells whoever looks after the workers' processes."""

    def report(self, worker_id: int, incarnation: int, error: BaseException) -> None:
        """A worker failed at what it was asked for."""

    def drained(self, worker_id: int, incarnation: int) -> None:
        """A worker that is to leave owes nothing any more."""
