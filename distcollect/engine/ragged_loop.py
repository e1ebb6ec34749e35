"""The loop for vector envs with filler steps, which make rows drift apart."""

from __future__ import annotations

import numpy as np

from distcollect.common.clock import clock_ns
from distcollect.common.step_counter import STEPPED
from distcollect.engine.ragged_buffer import RaggedBuffer, StepChunk
from distcollect.engine.rollout_loop import RolloutLoop
from distcollect.envs.base import Faulted, Step
from distcollect.policy.base import Policy
from distcollect.rollout.slab import Slab
from distcollect.rollout.spaces import Arrays


class BufferedLoop(RolloutLoop):
    """Fills rollouts of envs whose rows make their frames at different times, by way of a buffer.

    What faster rows have beyond a rollout is the surplus, which waits there for the next one.
    """

    _buffer: RaggedBuffer | None = None

    @property
    def num_waiting(self) -> int:
        return 0 if self._buffer is None else int(self._buffer.position.sum())

    def drop_waiting(self) -> int:
        return 0 if self._buffer is None else self._buffer.drop()

    def _buffer_for(self, num_steps: int, *, fresh: bool) -> RaggedBuffer:
        buffer = self._buffer
        is_other = buffer is None or buffer.num_steps != num_steps
        if buffer is not None and (fresh or is_other):
            # A trajectory can't span the gap that dropped frames leave.
            self.trajectories.cut_before(*buffer.last_ids())
            self.counter.lose("row_skew", buffer.drop())
        if buffer is None or is_other:
            buffer = self._buffer = RaggedBuffer(self.layout, num_steps, buffer)
        return buffer


class RaggedLoop(BufferedLoop):
    """Fills rollouts of vector envs that reset a row one step after its end.

    That step is a filler, no frame, so rows make their frames at different steps. All steps are
    written as they come. Then the fillers are taken out, for all rows at once. It goes on until
    every row has T frames.
    """

    _chunk: StepChunk | None = None

    def fill(self, slab: Slab, policy: Policy, *, fresh: bool) -> None:
        buffer, chunk = self._buffer_for(slab.num_steps, fresh=fresh), self._chunk
        if chunk is None or len(chunk.real) != slab.num_steps:
            chunk = self._chunk = StepChunk(self.layout, slab.num_steps)
        goes_on = True
        # After as many steps the slowest row has T frames, unless it makes fillers.
        while goes_on and (missing := slab.num_steps - int(buffer.position.min())) > 0:
            goes_on = self._fill_chunk(buffer, chunk, policy, missing)
        self.step_timer.due += slab.num_steps  # it counts from the rollout's begin
        buffer.emit(slab)

    def _fill_chunk(  # noqa: C901, PLR0912, PLR0915 - calls would cost more than what they do
        self, buffer: RaggedBuffer, chunk: StepChunk, policy: Policy, num_steps: int
    ) -> bool:
        """Make some steps, and append their frames to the buffer; False: the rollout ends here."""
        envs, weights, interrupts = self.envs, self.weights, self.interrupts
        current, trajectories = self.current, self.trajectories
        swaps, clips = self.options.swap_within_rollouts, self.options.clip_actions
        frames = chunk.frames
        starts = [(frames[leaf.key], current[leaf.key]) for leaf in self.layout.state]
        actions = [(leaf.key, frames[leaf.key]) for leaf in self.layout.action]
        extras = [frames[leaf.key] for leaf in self.layout.extras]
        outcomes = [(frames[leaf.key], envs.outcomes[leaf.key]) for leaf in self.layout.outcomes]
        rewards, cells, num_envs = chunk.reward, self.counter.cells, envs.num_envs
        step_timer, due, begin, middle = self.step_timer, self.step_timer.due, 0, 0
        chunk.begin(weights.version)
        goes_on, faulted = True, None
        action: Arrays = {}
        for step in range(num_steps):
            if interrupts.pending or (weights.pending and swaps):
                if self.between_steps():
                    goes_on = False
                    break
                chunk.policy_version[step:] = weights.version
            timed = step >= due
            for column, array in starts:
                column[step] = array
            if timed:
                begin = clock_ns()
            chosen, written = policy()
            for (key, column), value in zip(actions, chosen, strict=True):
                column[step] = value
                action[key] = value if value.dtype == column.dtype else column[step]
            if written:
                for column, value in zip(extras, written, strict=True):
                    column[step] = value
            else:  # a random policy writes none
                for column in extras:
                    column[step] = 0
            if clips:
                self.clip(action)
            if timed:
                middle = clock_ns()
            try:
                result = envs.step(action)
            except Faulted as error:
                faulted = error
                break
            if timed:
                step_timer.timed(begin, middle, clock_ns(), step_timer.stride)
                due = step_timer.due = step + step_timer.stride
            real, ended = result.real, result.ended
            chunk.num_steps = step + 1
            chunk.traj_ids[step] = trajectories.ids
            rewards[step] = result.reward
            for column, array in outcomes:
                column[step] = array
            if real is None:
                cells[STEPPED] += num_envs
            else:
                chunk.real[step] = real
                cells[STEPPED] += int(np.count_nonzero(real))
            if ended or real is not None:
                self._end_trajectories(chunk, step, result)
        # The next chunk of this rollout begins at its own step 0.
        step_timer.due = max(0, due - chunk.num_steps)
        # A policy may have changed its input in place before the envs raised.
        after = current if faulted is None else chunk.starts_of_next()
        overflow, num_lost = buffer.take(chunk, after)
        self.counter.lose("row_skew", num_lost)
        if num_lost:
            # A frame that found no room leaves a gap, which no trajectory may span.
            last = chunk.num_steps - 1
            last_ids = np.where(chunk.real[last], chunk.traj_ids[last], -1)
            trajectories.cut_before(overflow, last_ids[overflow])
        if faulted is not None:
            self._recover(buffer, faulted)
        return goes_on

    def _end_trajectories(self, chunk: StepChunk, step: int, result: Step) -> None:
        rows, trajectories = result.ended, self.trajectories
        if rows:
            if self.recovery.streaks:
                self.recovery.episodes_ended(rows)
            chunk.terminated[step] = result.terminated
            chunk.truncated[step] = result.truncated
            at = np.array(rows)
            chunk.add_finals(at, step, self.final)
            trajectories.new_ids(at)
        # A filler step does not belong to the episode that follows it.
        fillers = [] if result.real is None else np.flatnonzero(~result.real).tolist()
        trajectories.reset_policy_state([*rows, *fillers])

    def _recover(self, buffer: RaggedBuffer, faulted: Faulted) -> None:
        """Replace a vector env that raised: no row made a transition."""
        for fault in faulted.faults:
            self.recovery.rebuild(fault)
        rows = np.array(faulted.not_stepped)
        buffer.cut_short(rows, self.trajectories.ids[rows])
        self.trajectories.new_ids(rows)
        self.trajectories.reset_policy_state(faulted.not_stepped)
