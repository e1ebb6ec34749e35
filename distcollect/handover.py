"""A rollout that goes from its worker straight to another trainer.

::

    trainer 0                         worker                          trainer 1
    hand_over() ─── hand_over ──────▶ keeps it
                ─── handed_over ────▶ (answers when that is known)
      reference ┄┄┄┄┄┄┄┄┄ by whatever the user sends things ┄┄┄┄┄┄┄┄┄▶ take_over()
                                      ◀──────────── take_over ─────────
                                      ═════════════ tensors ══════════▶
                                      ◀───────────── confirm ──────────
                ◀─── True ──────────── its memory is free again

The worker alone decides, by one clock: if nobody has confirmed in time, nobody can any more, and
what may have been read of the rollout counts for nothing. So each is delivered once at most. Only
if the worker dies within the instant in which it answers the confirmation, the two trainers may
differ on what became of it.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from .errors import ArgumentError, DeadlineError, RolloutGone, WorkerError, WorkerLost
from .rollout import Header, Layout, Rollout, Slab, Tensors
from .threads import arrives
from .transport import Transport, identity

T = TypeVar("T")

# Of so many a worker can say why they can't be had any more.
_REMEMBERED = 64
_ENDED = "its worker's process has ended, or can't be reached from here"


@dataclass(frozen=True)
class RolloutReference:
    """A rollout that another trainer can take from its worker; small, and made to be pickled.

    Use its properties; the attributes below are for :meth:`RPCDataCollector.take_over`.

    Attributes:
        trainer: which of the run's trainers handed it over.
        run_id: the run's id.
        header: what is known of the rollout.
        layout: what its frames consist of.
        peer: its worker's id on the wire.
        contact: where the worker can be reached; None: it is gone.
        key: a secret that gives access to the rollout.
        tensors: the rollout itself, if it had been fetched before it was handed over.
    """

    trainer: int
    run_id: str
    header: Header
    layout: Layout = field(repr=False)
    peer: int = field(repr=False)
    contact: Any = field(repr=False)
    key: str = field(repr=False)
    tensors: Tensors | None = field(default=None, repr=False)

    @property
    def worker_id(self) -> int:
        """The worker that collected it: one of the trainer's that handed it over."""
        return self.header.worker_id

    @property
    def num_frames(self) -> int:
        """Frames in it."""
        return self.header.num_frames

    @property
    def policy_version(self) -> tuple[int, int]:
        """The lowest and the highest version among its frames."""
        return self.header.policy_version

    @property
    def num_bytes(self) -> int:
        """Size of its tensors."""
        return self.header.num_bytes


@dataclass(eq=False)
class _Kept:
    """A rollout for somebody to take.

    Attributes:
        slab: where it lies; None once that is not needed any more.
        outcome: whether it was taken, once that is certain.
        timer: gives it up.
        is_read: somebody reads it, or has.
        reason: why it can't be had, once that is so.
    """

    slab: Slab | None
    outcome: Future[bool]
    timer: threading.Timer
    is_read: bool = False
    reason: str = ""


class Keeper:
    """A worker's side: the rollouts that it keeps for other trainers. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[str, _Kept] = {}

    def keep(self, key: str, slab: Slab, keep_s: float) -> None:
        """Keep what lies in ``slab`` for so many seconds, for whoever shows ``key``."""
        reason = f"it was not taken within {keep_s:g} s"
        timer = threading.Timer(keep_s, self.give_up, (key, reason))
        timer.daemon = True
        with self._lock:
            self._kept[key] = _Kept(slab, Future(), timer)
            for old in list(self._kept)[:-_REMEMBERED]:
                del self._kept[old]
        timer.start()

    def outcome(self, key: str) -> Future[bool]:
        """Whether it was taken, once that is certain: then its memory is free.

        Raises:
            RolloutGone: it was never kept here.
        """
        with self._lock:
            return self._find(key).outcome

    def read(self, key: str) -> Slab:
        """Where it lies. May be asked for once.

        Raises:
            RolloutGone: says why.
        """
        with self._lock:
            kept = self._find(key)
            if kept.slab is None or kept.is_read:
                raise RolloutGone(kept.reason or "somebody else is taking it")
            kept.is_read = True
            return kept.slab

    def confirm(self, key: str) -> None:
        """Who has read it has all of it.

        Raises:
            RolloutGone: too late; says why.
        """
        with self._lock:
            kept = self._find(key)
        if not self._settle(kept, taken=True, reason="it was taken already"):
            raise RolloutGone(kept.reason)

    def give_up(self, key: str, reason: str) -> None:
        """Keep it no longer; nothing if it was taken."""
        with self._lock:
            kept = self._kept.get(key)
        if kept is not None:
            self._settle(kept, taken=False, reason=reason)

    def close(self) -> None:
        """Keep nothing any longer."""
        for key in list(self._kept):
            self.give_up(key, "its worker was stopped")

    def _find(self, key: str) -> _Kept:
        kept = self._kept.get(key)
        if kept is None:
            raise RolloutGone("its worker doesn't have it")
        return kept

    def _settle(self, kept: _Kept, *, taken: bool, reason: str) -> bool:
        with self._lock:
            if kept.slab is None:
                return False
            kept.slab = None
            kept.reason = reason
        kept.timer.cancel()
        kept.outcome.set_result(taken)
        return True


class Taker:
    """A trainer's side: takes rollouts that were handed over from their workers."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        # One for each worker: that of an earlier process may hold memory of it.
        self._peers: dict[tuple[int, int], int] = {}

    def take(self, reference: RolloutReference, timeout_s: float) -> Rollout:
        """Move a rollout here.

        Raises:
            ArgumentError: it is of another run.
            RolloutGone: it can't be had; names the worker, and says why.
            DeadlineError: the worker did not answer in time; names it.
        """
        if reference.tensors is not None:
            return Rollout(reference.header, reference.tensors)
        self._meet(reference)
        deadline = time.monotonic() + timeout_s

        def answer(future: Future[T]) -> T:
            if arrives(future, deadline - time.monotonic()):
                return future.result()
            raise DeadlineError(
                f"{_name(reference)} was not taken within {timeout_s:g} s: its worker did not "
                "answer in time"
            )

        peer, key = reference.peer, reference.key
        try:
            tensors: Tensors = answer(self._transport.take(peer, key))
            answer(self._transport.call(peer, "confirm", key))
        except DeadlineError:
            self._leave(reference)
            raise
        except WorkerLost as error:
            self._leave(reference)
            raise _gone(reference, _ENDED) from error
        except WorkerError as error:
            raise _gone(reference, error.message) from error
        return Rollout(reference.header, tensors)

    def _meet(self, reference: RolloutReference) -> None:
        """Make its worker reachable from here."""
        run_id = identity().run_id
        if reference.run_id != run_id:
            raise ArgumentError(
                f"{reference} is of another run (this is {run_id!r}): rollouts are handed over "
                "between the trainers of one launch (run(main, num_trainers=...))"
            )
        if reference.contact is None:
            raise _gone(reference, _ENDED)
        if _is_own(reference):
            return
        slot = (reference.trainer, reference.worker_id)
        before = self._peers.get(slot, reference.peer)
        if before != reference.peer:
            self._transport.evict(before)
        self._peers[slot] = reference.peer
        self._transport.meet(reference.peer, reference.contact)

    def _leave(self, reference: RolloutReference) -> None:
        """What its worker still owes fails, and so nothing of it comes later."""
        if not _is_own(reference):
            self._transport.evict(reference.peer)


def _is_own(reference: RolloutReference) -> bool:
    return reference.trainer == identity().trainer


def _name(reference: RolloutReference) -> str:
    return (
        f"rollout {reference.header.sequence} of worker {reference.worker_id} of trainer "
        f"{reference.trainer}"
    )


def _gone(reference: RolloutReference, reason: str) -> RolloutGone:
    message = (
        f"its rollout {reference.header.sequence}, which trainer {reference.trainer} handed over, "
        f"is gone: {reason}"
    )
    return RolloutGone(message, worker_id=reference.worker_id)
