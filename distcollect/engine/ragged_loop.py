"""The loop for vector envs with filler steps, which make rows drift apart."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from distcollect.common.clock import clock_ns
from distcollect.engine.ragged_buffer import RaggedBuffer
from distcollect.engine.rollout_loop import RolloutLoop
from distcollect.envs.base import Faulted, Step
from distcollect.policy.base import Policy
from distcollect.rollout.layout import FAULTED, POLICY_VERSION, TRAJ_IDS
from distcollect.rollout.slab import Slab
from distcollect.rollout.spaces import Arrays


@dataclass(eq=False)
class RaggedLoop(RolloutLoop):
    """Fills rollouts of vector envs that reset a row one step after its end.

    That step is a filler, no frame, so rows make their frames at different steps. It goes on until
    every row has T frames; what faster rows have beyond that is the surplus, which waits in a
    buffer for the next rollout.
    """

    _buffer: RaggedBuffer | None = field(init=False, default=None)

    @property
    def surplus(self) -> np.ndarray:
        return super().surplus if self._buffer is None else self._buffer.position.copy()

    def fill(self, slab: Slab, policy: Policy, *, fresh: bool) -> None:
        envs, weights, trajectories = self.envs, self.weights, self.trajectories
        buffer = self._buffer_for(slab.num_steps, fresh=fresh)
        swaps = self.options.swap_within_rollouts
        while buffer.position.min() < slab.num_steps:
            if (self.interrupts.pending or (weights.pending and swaps)) and self.between_steps():
                break
            starts = {key: array.copy() for key, array in self.current.items()}
            begin = clock_ns()
            chosen, written = policy()
            action = {
                leaf.key: tensor.numpy()
                for leaf, tensor in zip(self.layout.action, chosen, strict=True)
            }
            clipped = dict(action)
            self.clip(clipped)
            middle = clock_ns()
            try:
                result = envs.step(clipped)
            except Faulted as faulted:
                self._recover(buffer, starts, faulted)
                continue
            self.step_timer.timed(begin, middle, clock_ns(), 1)
            if result.ended and self.recovery.streaks:
                self.recovery.episodes_ended(result.ended)
            real = np.ones(envs.num_envs, bool) if result.real is None else result.real
            self.counter.add(int(real.sum()))
            values: Arrays = {**starts, **action, **envs.outcomes}
            for index, leaf in enumerate(self.layout.extras):
                # A random policy writes none.
                values[leaf.key] = written[index].numpy() if written else leaf.zeros(envs.num_envs)
            values.update(self._bookkeeping(result))
            overflow = buffer.write(real, values, self.current, self.final, result.ended)
            self.counter.lose("row_skew", len(overflow))
            # A frame that found no room leaves a gap, which no trajectory may span.
            for row in {*result.ended, *overflow}:
                trajectories.new_id(row)
            # A filler step does not belong to the episode that follows it.
            trajectories.reset_policy_state([*result.ended, *np.flatnonzero(~real)])
        buffer.emit(slab)

    def abandon(self) -> None:
        if self._buffer is not None:
            self._buffer.drop()

    def drop_surplus(self) -> None:
        if self._buffer is not None:
            self.counter.lose("row_skew", self._buffer.drop())

    def _buffer_for(self, num_steps: int, *, fresh: bool) -> RaggedBuffer:
        buffer = self._buffer
        if buffer is not None and (fresh or buffer.num_steps != num_steps):
            # A trajectory can't span the gap that dropped frames leave.
            for row in np.flatnonzero(buffer.position).tolist():
                self.trajectories.new_id(row)
            self.drop_surplus()
        if buffer is None or buffer.num_steps != num_steps:
            buffer = self._buffer = RaggedBuffer(self.layout, num_steps)
        return buffer

    def _bookkeeping(self, result: Step) -> Arrays:
        num_envs = self.envs.num_envs
        return {
            ("reward",): result.reward,
            ("terminated",): result.terminated,
            ("truncated",): result.truncated,
            TRAJ_IDS: self.trajectories.ids,
            POLICY_VERSION: np.full(num_envs, self.weights.version),
            FAULTED: np.zeros(num_envs, bool),
        }

    def _recover(self, buffer: RaggedBuffer, starts: Arrays, faulted: Faulted) -> None:
        """Replace a vector env that raised: no row made a transition."""
        for fault in faulted.faults:
            self.recovery.rebuild(fault)
        for row in faulted.not_stepped:
            buffer.cut_short(row, self.trajectories.ids[row], starts)
            self.trajectories.new_id(row)
        self.trajectories.reset_policy_state(faulted.not_stepped)
