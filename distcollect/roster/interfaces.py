"""What supervision tells the pool about workers, and what the pool tells supervision."""

from __future__ import annotations

from typing import Protocol


class MembershipObserver:
    """Follows which workers are there, as the pool does. All is called on one thread."""

    def join(self, worker_id: int, incarnation: int, peer: int, server: int | None = None) -> None:
        """A process is there and has tried out its envs.

        Args:
            worker_id: its slot.
            incarnation: its number there.
            peer: its id on the wire.
            server: the slot of the inference server that has its policy; None: it has its own.
        """

    def leave(self, worker_id: int, incarnation: int) -> None:
        """A worker is to leave: request nothing more, and call ``drained`` once it owes nothing."""

    def lose(self, worker_id: int, incarnation: int, *, replaced: bool) -> None:
        """A worker is gone; ``replaced``: another process is on its way to its slot."""

    def account(self, worker_id: int, incarnation: int, cause: str, stepped: int | None) -> None:
        """A process is gone for ``cause``; it had stepped this many frames (None: not known)."""

    def fail(self, error: BaseException) -> None:
        """The run can't go on, because of ``error``."""


class FailureSink(Protocol):
    """Learns of workers that fail or may end: the supervision of their processes."""

    def report(
        self, worker_id: int, incarnation: int, error: BaseException, *, is_final: bool = False
    ) -> None:
        """A worker failed at a call; ``is_final``: to replace it would not help."""

    def drained(self, worker_id: int, incarnation: int) -> None:
        """A worker that is to leave owes no rollout any more: it may end."""
