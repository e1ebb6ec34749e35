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
from concurrent.futures import Future
from dataclasses import dataclass

from distcollect.errors import RolloutGone
from distcollect.rollout.slab import Slab

# Of so many a worker can say why they can't be had any more.
_REMEMBERED = 64


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


class HandoverStore:
    """A worker's side: the rollouts that it keeps for other trainers. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[str, _Kept] = {}

    def receiver_state(self, key: str, slab: Slab, keep_s: float) -> None:
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
