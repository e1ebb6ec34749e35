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
from enum import Enum

from distcollect.errors import RolloutGone
from distcollect.rollout.slabs import AnySlab

# The store remembers as many rollouts, to say why one can't be had any more.
_REMEMBERED = 64


class _State(Enum):
    """What has become of a rollout; :data:`_NEXT` says what can follow."""

    KEPT = "kept"
    READ = "read"  # a trainer has read it, and may confirm
    TAKEN = "taken"
    GIVEN_UP = "given up"


_NEXT = {
    _State.KEPT: {_State.READ, _State.TAKEN, _State.GIVEN_UP},
    _State.READ: {_State.TAKEN, _State.GIVEN_UP},
    _State.TAKEN: set[_State](),
    _State.GIVEN_UP: set[_State](),
}


@dataclass(eq=False)
class _KeptRollout:
    """A rollout that another trainer may take.

    Attributes:
        slab: where it lies; None once it was taken or given up.
        outcome: completes with whether it was taken.
        timer: gives it up.
        state: what has become of it.
        why_gone: why it can't be had, once that is so.
    """

    slab: AnySlab | None
    outcome: Future[bool]
    timer: threading.Timer
    state: _State = _State.KEPT
    why_gone: str = "another trainer is reading it"


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
        """Completes with whether it was taken; from then on its memory may be used again.

        Raises:
            RolloutGone: it was never kept here.
        """
        with self._lock:
            return self._find(key).outcome

    def read(self, key: str) -> AnySlab:
        """Where it lies. May be read once.

        Raises:
            RolloutGone: it can't be had; says why.
        """
        with self._lock:
            rollout = self._find(key)
            if rollout.slab is None or _State.READ not in _NEXT[rollout.state]:
                raise RolloutGone(rollout.why_gone)
            rollout.state = _State.READ
            return rollout.slab

    def confirm(self, key: str) -> None:
        """The trainer that read it has all of it.

        Raises:
            RolloutGone: too late; says why.
        """
        with self._lock:
            rollout = self._find(key)
        if not self._settle(rollout, _State.TAKEN, "it was taken already"):
            raise RolloutGone(rollout.why_gone)

    def give_up(self, key: str, reason: str) -> None:
        """Keep it no longer; does nothing if it was taken."""
        with self._lock:
            rollout = self._rollouts.get(key)
        if rollout is not None:
            self._settle(rollout, _State.GIVEN_UP, reason)

    def close(self) -> None:
        """Keep nothing any longer."""
        for key in list(self._rollouts):
            self.give_up(key, "its worker was stopped")

    def _find(self, key: str) -> _KeptRollout:
        rollout = self._rollouts.get(key)
        if rollout is None:
            raise RolloutGone("its worker doesn't have it")
        return rollout

    def _settle(self, rollout: _KeptRollout, state: _State, why_gone: str) -> bool:
        """Enter a final state; False if another one was entered before."""
        with self._lock:
            if state not in _NEXT[rollout.state]:
                return False
            rollout.state = state
            rollout.slab = None
            rollout.why_gone = why_gone
        rollout.timer.cancel()
        rollout.outcome.set_result(state is _State.TAKEN)
        return True
