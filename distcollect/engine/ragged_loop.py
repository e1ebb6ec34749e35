"""The loop for vector envs with filler steps, which make rows drift apart."""

from __future__ import annotations

import numpy as np

from distcollect.engine.aligned_loop import AlignedLoop
from distcollect.engine.ragged_buffer import RaggedBuffer
from distcollect.envs.base import Faulted, Step
from distcollect.policy.base import Policy
from distcollect.rollout.slab import Slab


class RaggedLoop(AlignedLoop):
    """Fills rollouts of vector envs that reset a row one step after its end.

    That step is a filler, no frame, so rows make their frames at different steps. All steps are
    written to a slab as they come, in chunks. Then the fillers are taken out, for all rows at once.
    It goes on until every row has T frames.
    """

    _chunk: Slab | None = None
    _real: np.ndarray  # bool ``[n, T]``, False where a step of the chunk is a filler
    _faulted: Faulted | None = None  # it ended the chunk

    def fill(self, slab: Slab, policy: Policy, *, fresh: bool) -> None:
        buffer, chunk = self._buffer_for(slab.num_steps, fresh=fresh), self._chunk
        if chunk is None or chunk.num_steps != slab.num_steps:
            chunk = self._chunk = Slab(self.layout, slab.num_steps)
            self._real = np.ones((self.envs.num_envs, slab.num_steps), bool)
        goes_on = True
        # After as many steps the slowest row has T frames, unless it makes fillers.
        while goes_on and (missing := slab.num_steps - int(buffer.position.min())) > 0:
            goes_on = self._fill_chunk(buffer, chunk, policy, missing)
        self.step_timer.due += slab.num_steps  # it counts from the rollout's begin
        buffer.emit(slab)

    def _fill_chunk(
        self, buffer: RaggedBuffer, chunk: Slab, policy: Policy, num_steps: int
    ) -> bool:
        """Make some steps, and append their frames to the buffer; False: the rollout ends here."""
        timer, trajectories = self.step_timer, self.trajectories
        chunk.clear()
        if not policy.extras:  # a random one, which writes none
            for array in chunk.extras.values():
                array.fill(0)
        self._real.fill(True)
        self._faulted = None
        num_made = self._make_steps(chunk, policy, num_steps)
        # The next chunk of this rollout begins at its own step 0.
        timer.due = max(0, timer.due - num_made)
        faulted, after, real = self._faulted, self.current, self._real[:, :num_made]
        if faulted is not None:
            # A policy may have changed its input in place before the envs raised.
            after = {key: column[:, num_made] for key, column in chunk.root.items()}
        overflow, num_lost = buffer.take(chunk, real, after)
        self.counter.lose("row_skew", num_lost)
        if num_lost:
            # A frame that found no room leaves a gap, which no trajectory may span.
            last_ids = np.where(real[:, -1], chunk.traj_ids[:, num_made - 1], -1)
            trajectories.cut_before(overflow, last_ids[overflow])
        if faulted is None:
            return num_made == num_steps
        for fault in faulted.faults:
            self.recovery.rebuild(fault)
        rows = np.array(faulted.not_stepped)
        buffer.cut_short(rows, trajectories.ids[rows])
        trajectories.begin(rows)
        trajectories.reset_policy(faulted.not_stepped)
        return True

    def _end_trajectories(self, slab: Slab, step: int, result: Step) -> None:
        if result.real is not None:
            self._real[:, step] = result.real
        super()._end_trajectories(slab, step, result)

    def _recover(self, slab: Slab, step: int, policy: Policy, faulted: Faulted) -> bool:
        self._faulted = faulted
        return False
