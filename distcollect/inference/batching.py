"""Decides when an inference server computes the requests that wait, without sockets or clocks.

A batch is computed once half of the live callers wait, or the first of them has waited for as long
as a forward pass takes, at most 5 ms. A caller is live while it asks as often as it used to: one
that has ended, or whose envs are slow for once, is not waited for.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass

_LONGEST_WAIT_NS = 5_000_000
# A caller is live for so many times its usual pause after an answer, and this much longer.
_PATIENCE = 2
_PATIENCE_NS = 1_000_000


@dataclass(eq=False)
class _Caller:
    """One that asks again and again.

    Attributes:
        asked_ns: since when it waits for an answer; None: it doesn't.
        answered_ns: when it got its last answer.
        pause_ns: how long it usually takes from an answer to its next request.
    """

    asked_ns: int | None = None
    answered_ns: int = 0
    pause_ns: float = 0.0

    def is_live(self, now: int) -> bool:
        patience = _PATIENCE * self.pause_ns + _PATIENCE_NS
        return self.asked_ns is not None or now - self.answered_ns < patience


class Batching:
    """Knows who waits. Times are nanoseconds of any clock that only goes forward.

    Attributes:
        forward_ns: how long a forward pass lately took.
    """

    def __init__(self) -> None:
        self.forward_ns = 0.0
        self._callers: dict[Hashable, _Caller] = {}

    def asked(self, caller: Hashable, now: int) -> None:
        """A request has come; one that the same caller made before is void."""
        known = self._callers.setdefault(caller, _Caller())
        if known.asked_ns is None and known.answered_ns:
            pause = now - known.answered_ns
            known.pause_ns += (pause - known.pause_ns) / 4 if known.pause_ns else pause
        known.asked_ns = now

    def answered(self, callers: Collection[Hashable], now: int, took_ns: int) -> None:
        """These got their answers, after a forward pass that took this long."""
        self.forward_ns += (took_ns - self.forward_ns) / 4 if self.forward_ns else took_ns
        for caller in callers:
            if (known := self._callers.get(caller)) is not None:
                known.asked_ns, known.answered_ns = None, now

    def gone(self, caller: Hashable) -> None:
        """A caller has ended."""
        self._callers.pop(caller, None)

    def wait_ns(self, now: int) -> int | None:
        """How long until what waits is computed, unless more comes; 0: now. None: nothing waits."""
        waiting = [c.asked_ns for c in self._callers.values() if c.asked_ns is not None]
        if not waiting:
            return None
        num_live = sum(caller.is_live(now) for caller in self._callers.values())
        if 2 * len(waiting) >= num_live:
            return 0
        due = min(waiting) + min(self.forward_ns, _LONGEST_WAIT_NS)
        return max(0, int(due - now))
