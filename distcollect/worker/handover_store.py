"""Rollouts that a worker keeps until another trainer takes them.

::

    trainer 0                         worker                          trainer 1
              ─── hand_over ────────▶ keeps it
              ─── handover_outcome ─▶ (answers when that is known)
      reference ┄┄┄┄┄┄┄┄┄ by whatever the user sends things ┄┄┄┄┄┄┄┄┄▶ take_over()
                                      ◀──────── read_handover ────────
                                      ═════════════ tensors ══════════▶
                                      ◀──────── confirm_handover ─────
              ◀─── True ──────────── its memory is free again

The worker alone decides whether a rollout was taken, by its own clock: a confirmation that comes
too late is refused, and the trainer discards what it has read. So a rollout is delivered at most
once. If the worker dies in the moment in which it answers the confirmation, one trainer may count
the rollout as delivered and the other as lost.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass

from distcollect.errors import RolloutGone
from distcollect.rollout.slabs import AnySlab

# The store remembers as many rollouts, to say why one can't be had any more.
_REMEMBERED = 64


@dataclass(eq=False)
class _KeptRollout:
    """A rollout that another trainer may take.

    Attributes:
        slab: where it lies; None once it was taken or given up.
        outcome: completes with whether it was taken.
        timer: gives it up.
        why_gone: why it can't be read; "" if it can be.
    """

    slab: AnySlab | None
    outcome: Future[bool]
    timer: threading.Timer
    why_gone: str = ""


class HandoverStore:
    """The rollouts that a worker keeps for other trainers; safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rollouts: dict[str, _KeptRollout] = {}

    def keep(self, key: str, slab: AnySlab, keep_s: float) -> None:
        """Keep the rollout in ``slab`` for ``keep_s`` seconds, for a trainer that shows ``key``."""
        reason = f"it was not taken within {keep_s:g} s"
        timer = threading.Timer(keep_s, self.give_up, (key, reason))
        timer.daemon = True
        with self._lock:
            self._rollouts[key] = _KeptRollout(slab, Future(), timer)
            for old in list(self._rollouts)[:-_REMEMBERED]:
                del self._rollouts[old]
        timer.start()

    def outcome(self, key: str) -> Future[bool]:
        """Return what completes with whether it was taken; then its memory may be used again.

        Raises:
            RolloutGone: it was never kept here.
        """
        return self._find(key).outcome

    def read(self, key: str) -> AnySlab:
        """Return where it lies. May be read once.

        Raises:
            RolloutGone: it can't be had; says why.
        """
        rollout = self._find(key)
        with self._lock:
            if rollout.slab is None or rollout.why_gone:
                raise RolloutGone(rollout.why_gone)
            rollout.why_gone = "another trainer is reading it"
            return rollout.slab

    def confirm(self, key: str) -> None:
        """Note that the trainer that read it has all of it.

        Raises:
            RolloutGone: too late; says why.
        """
        rollout = self._find(key)
        if not self._settle(rollout, "it was taken already", is_taken=True):
            raise RolloutGone(rollout.why_gone)

    def give_up(self, key: str, reason: str) -> None:
        """Keep it no longer; does nothing if it was taken."""
        rollout = self._rollouts.get(key)
        if rollout is not None:
            self._settle(rollout, reason, is_taken=False)

    def close(self) -> None:
        """Keep nothing any longer."""
        for key in list(self._rollouts):
            self.give_up(key, "its worker was stopped")

    def _find(self, key: str) -> _KeptRollout:
        try:
            return self._rollouts[key]
        except KeyError:
            raise RolloutGone("its worker doesn't have it") from None

    def _settle(self, rollout: _KeptRollout, why_gone: str, *, is_taken: bool) -> bool:
        """Decide what becomes of a rollout; return False if that was decided before."""
        with self._lock:
            if rollout.slab is None:
                return False
            rollout.slab, rollout.why_gone = None, why_gone
        rollout.timer.cancel()
        rollout.outcome.set_result(is_taken)
        return True
