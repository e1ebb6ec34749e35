"""Decides whether a worker process hangs, from what it writes to its step counter."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from distcollect.common.step_counter import LIMIT_MS, TASK, Task

Block = tuple[int, ...]

_TEXTS = {
    Task.COLLECT: "its envs finished no step within {:.1f} s",
    Task.EVALUATE: "it made no progress with an evaluation within {:.1f} s",
    Task.CALL: "a method of its envs that was called did not end within {:.1f} s",
    Task.SET_UP: "it did not take a seed or a state within {:.1f} s",
    Task.HOOK: "a pre_collect_hook or post_collect_hook did not end within {:.1f} s",
}


@dataclass
class ProgressWatch:
    """Whether one process makes progress.

    Each step, and each begin and end of a task, is progress. A process that is idle is not watched.
    When it starts, and when its workers stop, other deadlines hold.

    Attributes:
        step_timeout_s: how long a step may take; None: as long as it likes.
    """

    step_timeout_s: float | None
    _seen: tuple[Block, ...] = ()
    _since: float = field(default=0.0)

    def overdue(self, blocks: tuple[Block, ...], now: float) -> str:
        """Return what the process has been doing for too long, in words; "" if nothing.

        Args:
            blocks: what :meth:`.SharedStepCounter.blocks` gives.
            now: seconds of the monotonic clock.
        """
        busy = [block for block in blocks if block[TASK] != Task.IDLE]
        if blocks != self._seen or not busy:
            self._seen, self._since = blocks, now
            return ""
        took_s = now - self._since
        # The last block that is busy says most: an evaluation steps envs of its own.
        for block in reversed(busy):
            if took_s >= self._limit_s(block):
                where = ", in an evaluation" if block is blocks[-1] else ""
                return _TEXTS[Task(block[TASK])].format(took_s) + where
        return ""

    def _limit_s(self, block: Block) -> float:
        step_s = math.inf if self.step_timeout_s is None else self.step_timeout_s
        own_s = block[LIMIT_MS] / 1000
        # The deadline of an evaluation is for its episodes. Its envs may take longer to make.
        is_call = block[TASK] == Task.CALL
        return own_s if is_call else max(own_s, step_s)
