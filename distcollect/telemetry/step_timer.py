"""Counters of a process that steps envs: where its time went, and which episodes ended.

They cost very little: the clock is read only at every few steps.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from distcollect.common.clock import clock_ns
from distcollect.rollout.header import Span, WorkReport
from distcollect.rollout.slabs import AnySlab
from distcollect.rollout.spaces import Key
from distcollect.telemetry.trace import ROLLOUT, STEPS, WEIGHTS

# Of short steps one in so many is timed, and counts for all of them. It is a prime, since envs may
# do something special every few steps.
_STRIDE = 7
# Longer steps are all timed: reading the clock takes some 0.2 us.
_SHORT_NS = 1_000_000
# A trace has every step of the first rollouts, and later the timed steps of one rollout in so many.
_WHOLE_ROLLOUTS = 4
_EVERY_ROLLOUT = 64
_MOST_STEPS = 256  # in a rollout; of more, every second or third one and so on is kept
_MOST_OTHERS = 64


class StepTimer:
    """Measures how long an engine spends on what, and keeps spans for a trace if there is one.

    Attributes:
        rests: see :class:`WorkReport`.
        due: index of the next step to be timed in the current rollout.
        stride: how many steps a timed step counts for.
    """

    def __init__(
        self, num_envs: int, metrics: Mapping[str, Key] | None = None, *, traces: bool = False
    ) -> None:
        """Make one for an engine.

        Args:
            num_envs: number of envs.
            metrics: see :class:`~distcollect.Monitor`.
            traces: keep spans.
        """
        self.rests: tuple[int, ...] = ()
        self.due = 0
        self.stride = 1
        self._was_reset = False
        self._sums: Counter[str] = Counter()  # by their names in a WorkReport
        self._began_at = 0
        self._cpu_at = 0
        self._ended_at: int | None = None
        self._episodes = Episodes(num_envs)
        self._finished: tuple[tuple[float, ...], tuple[int, ...]] = ((), ())
        self._metrics = metrics or {}
        self._values: dict[str, tuple[float, ...]] | None = None
        self._traces = traces
        self._num_begun = 0
        self._version = 0
        self._keeps_steps = False
        self._steps: list[tuple[int, int, int]] = []
        self._others: deque[Span] = deque(maxlen=_MOST_OTHERS)
        self._received: deque[Span] = deque(maxlen=_MOST_OTHERS)

    def begin(self) -> None:
        """A rollout begins."""
        if self.due > _STRIDE:
            self.due = 0  # the last rollout was interrupted
        if self._traces:
            number, self._num_begun = self._num_begun, self._num_begun + 1
            is_whole = number < _WHOLE_ROLLOUTS
            if is_whole:
                self.due, self.stride = 0, 1
            self._keeps_steps = is_whole or number % _EVERY_ROLLOUT == 0
            self._steps.clear()
            self._others.clear()
        now = self._began_at = clock_ns()
        self._cpu_at = time.thread_time_ns()
        if self._ended_at is not None:
            self._sums["wait_ns"] += now - self._ended_at

    def end(self) -> None:
        """A rollout has ended, complete or not."""
        now = self._ended_at = clock_ns()
        self._sums["busy_ns"] += now - self._began_at
        self._sums["cpu_ns"] += time.thread_time_ns() - self._cpu_at

    def restart_wait(self) -> None:
        """Count the wait for the next request from now: until now the worker did something else."""
        if self._ended_at is not None:
            self._ended_at = clock_ns()

    def timed(self, begin: int, middle: int, end: int, stride: int) -> None:
        """A step was timed: the policy up to ``middle``, then envs; it counts ``stride`` times."""
        self._sums["policy_ns"] += (middle - begin) * stride
        self._sums["env_ns"] += (end - middle) * stride
        if self._keeps_steps:
            self._steps.append((begin, middle, end))

    def waited(self, ns: int) -> None:
        """In what was timed as a step of the envs, so long was waited for the policy."""
        self._sums.update(policy_ns=ns, env_ns=-ns)

    def answered(self, **sums: int) -> None:
        """An inference server has answered; see :class:`WorkReport`."""
        self._sums.update(sums, num_answers=1)

    def swapped(self, begin: int, end: int, version: int) -> None:
        """The newest weights were swapped in; they have this version."""
        self._sums["swap_ns"] += end - begin
        if version != self._version:
            self._version = version
            self._others.append((STEPS, f"swap in version {version}", begin, end))

    def was_reset(self, begin: int, end: int) -> None:
        """All envs were reset."""
        self._was_reset = True
        self._sums["env_ns"] += end - begin
        self._others.append((STEPS, "reset", begin, end))

    def received(self, version: int, begin: int, end: int) -> None:
        """Weights were received; called by the thread that receives them."""
        self._received.append((WEIGHTS, f"receive version {version}", begin, end))

    def spans(self) -> tuple[Span, ...]:
        """Return the spans of the last rollout, whose tensors are ready; none without a trace."""
        if not self._traces or self._ended_at is None:
            return ()
        spans = [
            (STEPS, ROLLOUT, self._began_at, self._ended_at),
            (STEPS, "hand over", self._ended_at, clock_ns()),
            *self._others,
        ]
        for begin, middle, end in self._steps[:: 1 + len(self._steps) // _MOST_STEPS]:
            spans += [(STEPS, "policy", begin, middle), (STEPS, "env", middle, end)]
        while self._received:
            spans.append(self._received.popleft())
        return tuple(spans)

    def collected(self, slab: AnySlab, rests: tuple[int, ...] = ()) -> None:
        """A rollout is complete; ``rests``: see :class:`WorkReport`."""
        self.due = max(0, self.due - slab.num_steps)
        # The mean of the rollout, not the last step: one slow step must not change the stride.
        took_ns = clock_ns() - self._began_at
        self.stride = 1 if took_ns > _SHORT_NS * slab.num_steps else _STRIDE
        self.rests = rests
        returns, lengths = self._episodes.add(slab, rests)
        self._finished = tuple(returns), tuple(lengths)
        if self._metrics:
            at = self._episodes.ended_at
            values = {name: slab.values_at(key, at) for name, key in self._metrics.items()}
            self._values = {name: tuple(each.tolist()) for name, each in values.items()}

    def work(self) -> WorkReport:
        """Return all that was measured since the last call."""
        sums: Any = self._sums
        self._sums = Counter()
        begun = self._episodes.begun
        ends: Any = {"rests": self.rests, "begun": begun, "was_reset": self._was_reset}
        self._was_reset = False
        returns, lengths = self._finished
        return WorkReport(**sums, **ends, returns=returns, lengths=lengths, metrics=self._values)


class Episodes:
    """Returns and lengths of the episodes of n envs; an episode may span several rollouts.

    Attributes:
        ended_at: int64 ``[k]``, where the k episodes that ended in the last rollout have their last
            frame: ``row * T + step``.
        begun: see :class:`WorkReport`.
    """

    begun: tuple[int, ...] = ()

    def __init__(self, num_envs: int) -> None:
        # Id, and return and length so far, of the trajectory of each row's last frame.
        self._ids = np.full(num_envs, -1, np.int64)
        self._returns = np.zeros(num_envs)
        self._lengths = np.zeros(num_envs, np.int64)
        self.ended_at = np.zeros(0, np.int64)

    def add(self, slab: AnySlab, rests: tuple[int, ...] = ()) -> tuple[list[float], list[int]]:
        """Returns and lengths of the episodes that end in the next rollout.

        Episodes that end because their env raised, or by a reset, are left out, and so are
        ``rests``: trajectories whose episode began with frames that were dropped.
        """
        ids = slab.traj_ids.reshape(-1)
        # Split the rows into parts of trajectories, one row after the other.
        begins = np.append(True, ids[1:] != ids[:-1])
        begins[:: slab.num_steps] = True
        first = begins.nonzero()[0]
        last = np.append(first[1:], len(ids)) - 1
        returns = np.add.reduceat(slab.reward.reshape(-1), first, dtype=np.float64)
        is_real = ids[first] >= 0  # the others are padding
        first, last, returns = first[is_real], last[is_real], returns[is_real]
        lengths = last - first + 1
        parts = ids[first]
        is_end = (slab.ended & ~slab.faulted).reshape(-1)[last]
        if rests:
            is_end &= ~np.isin(parts, rests)
        self.ended_at = last[is_end]
        rows, heads = np.unique(first // slab.num_steps, return_index=True)
        # Add what belongs to earlier rollouts.
        goes_on = parts[heads] == self._ids[rows]
        self.begun = tuple(parts[heads][~goes_on].tolist())
        # Not times goes_on: NaN times 0 is NaN, which would spoil the next episode.
        returns[heads] += np.where(goes_on, self._returns[rows], 0.0)
        lengths[heads] += self._lengths[rows] * goes_on
        tails = np.append(heads[1:], len(parts))[: len(rows)] - 1
        self._ids[rows] = parts[tails]
        self._returns[rows] = returns[tails]
        self._lengths[rows] = lengths[tails]
        return returns[is_end].tolist(), lengths[is_end].tolist()
